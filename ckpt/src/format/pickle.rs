//! Python's pickles, protocols 0 to 5, as data: a machine that builds inert values and calls nothing.
//!
//! A global is a pair of names, and a call is a node that keeps its callee and its arguments. Values lie in one list and
//! name each other by index, so that what a pickle shares is shared here, and nothing that is done with them recurses.

use std::collections::HashMap;
use std::fmt;

/// Bytes of the longest pickle that is read.
pub(crate) const PICKLE_BYTES_MAX: u64 = 256 << 20;
/// Values of one pickle: each takes at least one byte of it, and some 40 in memory.
const VALUES_MAX: usize = 1 << 24;
/// Entries of the memo.
const MEMO_MAX: usize = 1 << 24;
/// Values on the stack; Python's own pickles keep a batch of 1,000 there.
const STACK_MAX: usize = 1 << 22;
/// Containers that are open at once; Python's recursion ends before.
const DEPTH_MAX: usize = 1000;
/// Decimal digits of an integer in text.
const DIGITS_MAX: usize = 4096;

/// A parsed pickle.
#[derive(Debug)]
pub(crate) struct Pickle {
    values: Vec<Value>,
    root: Id,
    /// Bytes up to its end.
    pub(crate) len: usize,
}

/// Index of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id(u32);

/// A value.
#[derive(Debug)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer of more than 64 bits.
    Long(Box<[u8]>),
    Float(f64),
    /// Code units that are no text are replaced.
    Text(Box<str>),
    Bytes(Box<[u8]>),
    Tuple(Box<[Id]>),
    List(Vec<Id>),
    /// In order; later keys may repeat earlier ones.
    Dict(Vec<(Id, Id)>),
    Set(Vec<Id>),
    Global(Box<Name>),
    Object(Box<Object>),
    /// Something outside the pickle, as torch's storages.
    Persistent(Id),
}

/// What a pickle names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) module: Box<str>,
    pub(crate) name: Box<str>,
}

/// The call of a name, which never took place, and what would have been put into its result.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) callee: Id,
    /// A tuple as a rule.
    pub(crate) args: Id,
    pub(crate) state: Option<Id>,
    pub(crate) items: Vec<Id>,
    pub(crate) pairs: Vec<(Id, Id)>,
}

/// Why bytes are no pickle that is read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} of the pickle: {fault}")]
pub struct PickleError {
    /// Position of the instruction.
    pub at: u64,
    /// What is wrong with it.
    pub fault: PickleFault,
}

/// What is wrong with an instruction of a pickle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PickleFault {
    #[error("it names `{name}`, which runs code or reaches the system; nothing was executed")]
    Refused { name: String },
    #[error("it ends early")]
    Ends,
    #[error("it is of protocol {found}, and protocols 0 to 5 are known")]
    Protocol { found: u8 },
    #[error("there is no instruction {found:#04x}")]
    Opcode { found: u8 },
    #[error("it takes more from the stack than is there")]
    Underflow,
    #[error("it needs a mark, and there is none")]
    NoMark,
    #[error("entry {index} of the memo was never set")]
    Memo { index: u64 },
    #[error("its operand is none: {what}")]
    Operand { what: &'static str },
    #[error("it has more than {max} {what}")]
    TooMany { what: &'static str, max: usize },
}

impl PickleError {
    /// Whether a name was refused, and the pickle may be whole.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.fault, PickleFault::Refused { .. })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

impl Name {
    pub(crate) fn is(&self, module: &str, name: &str) -> bool {
        &*self.module == module && &*self.name == name
    }

    /// Whether it runs code or reaches the system.
    fn is_refused(&self) -> bool {
        const SYSTEM: [&str; 17] = [
            "os",
            "posix",
            "nt",
            "sys",
            "subprocess",
            "importlib",
            "runpy",
            "pty",
            "socket",
            "shutil",
            "pickle",
            "_pickle",
            "marshal",
            "ctypes",
            "code",
            "webbrowser",
            "commands",
        ];
        const PLAIN: [&str; 20] = [
            "set",
            "frozenset",
            "list",
            "dict",
            "tuple",
            "bytearray",
            "bytes",
            "str",
            "unicode",
            "int",
            "long",
            "float",
            "complex",
            "bool",
            "object",
            "slice",
            "range",
            "xrange",
            "getattr",
            "Ellipsis",
        ];
        let top = self.module.split('.').next().unwrap_or_default();
        match top {
            "builtins" | "__builtin__" => !PLAIN.contains(&&*self.name),
            _ => SYSTEM.contains(&top),
        }
    }

    /// Whether the instructions of old classes may name it, too.
    fn is_plain(&self) -> bool {
        matches!(&*self.module, "builtins" | "__builtin__") && !self.is_refused()
            || self.is("collections", "OrderedDict")
            || self.is("argparse", "Namespace")
            || self.is("types", "SimpleNamespace")
    }
}

impl Pickle {
    /// Parses the pickle at the start of `input`; what is behind it is not looked at.
    pub(crate) fn parse(input: &[u8]) -> Result<Pickle, PickleError> {
        let mut machine = Machine {
            input,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        loop {
            let at = machine.at as u64;
            match machine.step() {
                Ok(None) => {}
                Ok(Some(root)) => return Ok(Pickle { values: machine.values, root, len: machine.at }),
                Err(fault) => return Err(PickleError { at, fault }),
            }
        }
    }

    /// The value of the whole pickle.
    pub(crate) fn root(&self) -> Id {
        self.root
    }

    pub(crate) fn value(&self, id: Id) -> &Value {
        &self.values[id.0 as usize]
    }

    pub(crate) fn text(&self, id: Id) -> Option<&str> {
        match self.value(id) {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn int(&self, id: Id) -> Option<i64> {
        match self.value(id) {
            Value::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// The elements of a tuple or a list.
    pub(crate) fn sequence(&self, id: Id) -> Option<&[Id]> {
        match self.value(id) {
            Value::Tuple(items) => Some(items),
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    pub(crate) fn global(&self, id: Id) -> Option<&Name> {
        match self.value(id) {
            Value::Global(name) => Some(name),
            _ => None,
        }
    }

    /// The called name, if the value is the result of a call.
    pub(crate) fn call(&self, id: Id) -> Option<(&Name, &Object)> {
        match self.value(id) {
            Value::Object(object) => Some((self.global(object.callee)?, object)),
            _ => None,
        }
    }

    /// The pairs of a map, or of what Python keeps in one: ordered maps and namespaces.
    pub(crate) fn pairs(&self, id: Id) -> Option<Vec<(Id, Id)>> {
        if let Value::Dict(pairs) = self.value(id) {
            return Some(pairs.clone());
        }
        let (name, object) = self.call(id)?;
        if name.is("collections", "OrderedDict") || name.is("collections", "defaultdict") {
            let mut pairs = Vec::new();
            let first = self.sequence(object.args)?.first().and_then(|first| self.sequence(*first));
            for pair in first.unwrap_or_default() {
                let [key, value] = self.sequence(*pair)? else { return None };
                pairs.push((*key, *value));
            }
            pairs.extend(&object.pairs);
            return Some(pairs);
        }
        let is_namespace = name.is("argparse", "Namespace")
            || name.is("types", "SimpleNamespace")
            || (name.is("copyreg", "_reconstructor") || name.is("copy_reg", "_reconstructor"))
                && self
                    .sequence(object.args)
                    .and_then(|args| self.global(*args.first()?))
                    .is_some_and(|class| class.is("argparse", "Namespace"));
        match (is_namespace, object.state.map(|state| self.value(state))) {
            (true, Some(Value::Dict(pairs))) => Some(pairs.clone()),
            (true, None) => Some(Vec::new()),
            _ => None,
        }
    }

    /// What the values outside the pickle are called.
    pub(crate) fn persistent(&self) -> impl Iterator<Item = Id> {
        self.values.iter().filter_map(|value| match value {
            Value::Persistent(of) => Some(*of),
            _ => None,
        })
    }

    /// What a value is, for a message.
    pub(crate) fn describe(&self, id: Id) -> String {
        match self.value(id) {
            Value::None => "None".to_owned(),
            Value::Bool(_) => "a bool".to_owned(),
            Value::Int(int) => format!("the integer {int}"),
            Value::Long(bytes) => format!("an integer of {} bytes", bytes.len()),
            Value::Float(float) => format!("the float {float}"),
            Value::Text(_) => "a text".to_owned(),
            Value::Bytes(bytes) => format!("a string of {} bytes", bytes.len()),
            Value::Tuple(_) => "a tuple".to_owned(),
            Value::List(_) => "a list".to_owned(),
            Value::Dict(_) => "a map".to_owned(),
            Value::Set(_) => "a set".to_owned(),
            Value::Global(name) => format!("the name `{name}`"),
            Value::Persistent(_) => "a storage".to_owned(),
            Value::Object(object) => match self.global(object.callee) {
                Some(name) => format!("an object of `{name}`"),
                None => "an object of no known class".to_owned(),
            },
        }
    }

    /// The values that `id` holds directly.
    pub(crate) fn children(&self, id: Id) -> Vec<Id> {
        let flat =
            |pairs: &[(Id, Id)]| pairs.iter().flat_map(|(key, value)| [*key, *value]).collect::<Vec<_>>();
        match self.value(id) {
            Value::Tuple(items) => items.to_vec(),
            Value::List(items) | Value::Set(items) => items.clone(),
            Value::Dict(pairs) => flat(pairs),
            Value::Persistent(of) => vec![*of],
            Value::Object(object) => {
                let mut all = vec![object.callee, object.args];
                all.extend(object.state);
                all.extend(&object.items);
                all.extend(flat(&object.pairs));
                all
            }
            _ => Vec::new(),
        }
    }
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

type Step<T> = Result<T, PickleFault>;

impl<'a> Machine<'a> {
    /// One instruction; the root if it was the last.
    fn step(&mut self) -> Step<Option<Id>> {
        let opcode = self.byte()?;
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => match self.byte()? {
                0..=5 => {}
                found => return Err(PickleFault::Protocol { found }),
            },
            // A frame's length is a hint for buffers; one that is not there is a file that was cut short.
            0x95 => {
                let len = self.le(8)?;
                if len > (self.input.len() - self.at) as u64 {
                    return Err(PickleFault::Ends);
                }
            }
            b'p' => {
                let index = self.decimal_index()?;
                self.memoize(index)?;
            }
            b'q' => {
                let index = self.le(1)?;
                self.memoize(index)?;
            }
            b'r' => {
                let index = self.le(4)?;
                self.memoize(index)?;
            }
            0x94 => self.memoize(self.memo.len() as u64)?,
            b'g' => {
                let index = self.decimal_index()?;
                self.recall(index)?;
            }
            b'h' => {
                let index = self.le(1)?;
                self.recall(index)?;
            }
            b'j' => {
                let index = self.le(4)?;
                self.recall(index)?;
            }
            b'(' => {
                if self.marks.len() == DEPTH_MAX {
                    return Err(PickleFault::TooMany { what: "containers in each other", max: DEPTH_MAX });
                }
                self.marks.push(self.stack.len());
            }
            b'0' => match self.marks.last() == Some(&self.stack.len()) {
                true => drop(self.marks.pop()),
                false => drop(self.pop()?),
            },
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.put(top)?;
            }
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            b'I' => {
                let line = self.line()?;
                match line {
                    b"00" => self.push(Value::Bool(false))?,
                    b"01" => self.push(Value::Bool(true))?,
                    digits => self.push_decimal(digits)?,
                }
            }
            b'L' => {
                let line = self.line()?;
                self.push_decimal(line.strip_suffix(b"L").unwrap_or(line))?;
            }
            b'J' => {
                let bits = self.le(4)? as u32;
                self.push(Value::Int(i64::from(bits as i32)))?;
            }
            b'K' => {
                let int = self.le(1)?;
                self.push(Value::Int(int as i64))?;
            }
            b'M' => {
                let int = self.le(2)?;
                self.push(Value::Int(int as i64))?;
            }
            0x8a => {
                let len = self.le(1)?;
                self.push_long(len)?;
            }
            0x8b => {
                let len = self.signed_len()?;
                self.push_long(len)?;
            }
            b'F' => {
                let text = std::str::from_utf8(self.line()?).ok().and_then(|text| text.parse().ok());
                self.push(Value::Float(text.ok_or(PickleFault::Operand { what: "a float in text" })?))?;
            }
            b'G' => {
                let bytes = self.take(8)?.try_into().expect("eight bytes were taken");
                self.push(Value::Float(f64::from_be_bytes(bytes)))?;
            }
            b'V' => {
                let text = raw_unicode(self.line()?);
                self.push(Value::Text(text.into()))?;
            }
            0x8c => {
                let len = self.le(1)?;
                self.push_text(len)?;
            }
            b'X' => {
                let len = self.le(4)?;
                self.push_text(len)?;
            }
            0x8d => {
                let len = self.le(8)?;
                self.push_text(len)?;
            }
            b'S' => {
                let bytes =
                    unquote(self.line()?).ok_or(PickleFault::Operand { what: "a string in quotes" })?;
                self.push_old_string(&bytes)?;
            }
            b'U' => {
                let len = self.le(1)?;
                let bytes = self.take(len)?;
                self.push_old_string(bytes)?;
            }
            b'T' => {
                let len = self.signed_len()?;
                let bytes = self.take(len)?;
                self.push_old_string(bytes)?;
            }
            b'C' => {
                let len = self.le(1)?;
                self.push_bytes(len)?;
            }
            b'B' => {
                let len = self.le(4)?;
                self.push_bytes(len)?;
            }
            0x8e | 0x96 => {
                let len = self.le(8)?;
                self.push_bytes(len)?;
            }
            b')' => self.push(Value::Tuple([].into()))?,
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items.into()))?;
            }
            0x85..=0x87 => {
                let at = self.stack.len().checked_sub(usize::from(opcode - 0x84));
                let at = at.filter(|at| self.floor() <= *at).ok_or(PickleFault::Underflow)?;
                let items = self.stack.split_off(at);
                self.push(Value::Tuple(items.into()))?;
            }
            b']' => self.push(Value::List(Vec::new()))?,
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Value::List(items))?;
            }
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = paired(&items)?;
                self.push(Value::Dict(pairs))?;
            }
            0x8f => self.push(Value::Set(Vec::new()))?,
            0x91 => {
                let items = self.pop_mark()?;
                self.push(Value::Set(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(&[item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.extend(&items)?;
            }
            0x90 => {
                let items = self.pop_mark()?;
                match self.top_value()? {
                    Value::Set(all) => all.extend(items),
                    _ => return Err(PickleFault::Operand { what: "a set" }),
                }
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(vec![(key, value)])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(paired(&items)?)?;
            }
            b'c' => {
                let name = self.name_of_lines()?;
                self.push_global(name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (&self.values[module.0 as usize], &self.values[name.0 as usize]) {
                    (Value::Text(module), Value::Text(name)) => {
                        let name = Name { module: module.clone(), name: name.clone() };
                        self.push_global(name)?;
                    }
                    _ => return Err(PickleFault::Operand { what: "a name" }),
                }
            }
            b'R' | 0x81 => {
                let (args, callee) = (self.pop()?, self.pop()?);
                self.push_object(callee, args)?;
            }
            0x92 => {
                let (_keywords, args, callee) = (self.pop()?, self.pop()?, self.pop()?);
                self.push_object(callee, args)?;
            }
            b'b' => {
                let state = self.pop()?;
                match self.top_value()? {
                    Value::Object(object) => object.state = Some(state),
                    _ => return Err(PickleFault::Operand { what: "an object" }),
                }
            }
            b'i' => {
                let name = self.name_of_lines()?;
                let args = self.pop_mark()?;
                self.push_old_object(name, args)?;
            }
            b'o' => {
                let mut args = self.pop_mark()?.into_iter();
                let class = args.next().ok_or(PickleFault::Underflow)?;
                match &self.values[class.0 as usize] {
                    Value::Global(name) => self.push_old_object((**name).clone(), args.collect())?,
                    _ => return Err(PickleFault::Operand { what: "a class" }),
                }
            }
            b'P' => {
                let text = String::from_utf8_lossy(self.line()?).into();
                self.push(Value::Text(text))?;
                let of = self.pop()?;
                self.push(Value::Persistent(of))?;
            }
            b'Q' => {
                let of = self.pop()?;
                self.push(Value::Persistent(of))?;
            }
            // Numbers that only the program that wrote them can turn into names.
            0x82..=0x84 => {
                return Err(PickleFault::Refused { name: "a code of copyreg's registry".to_owned() });
            }
            found => return Err(PickleFault::Opcode { found }),
        }
        Ok(None)
    }

    fn take(&mut self, len: u64) -> Step<&'a [u8]> {
        let rest = &self.input[self.at..];
        if len > rest.len() as u64 {
            return Err(PickleFault::Ends);
        }
        self.at += len as usize;
        Ok(&rest[..len as usize])
    }

    fn byte(&mut self) -> Step<u8> {
        Ok(self.take(1)?[0])
    }

    /// An unsigned number of `len` bytes.
    fn le(&mut self, len: u64) -> Step<u64> {
        Ok(self.take(len)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn signed_len(&mut self) -> Step<u64> {
        let len = self.le(4)? as u32 as i32;
        u64::try_from(len).map_err(|_| PickleFault::Operand { what: "a length" })
    }

    /// Up to the end of the line, which is taken, too.
    fn line(&mut self) -> Step<&'a [u8]> {
        let rest = &self.input[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or(PickleFault::Ends)?;
        self.at += len + 1;
        Ok(&rest[..len])
    }

    fn decimal_index(&mut self) -> Step<u64> {
        let line = std::str::from_utf8(self.line()?).ok();
        line.and_then(|line| line.parse().ok()).ok_or(PickleFault::Operand { what: "an index of the memo" })
    }

    fn name_of_lines(&mut self) -> Step<Name> {
        let [module, name] = [self.line()?, self.line()?].map(|line| String::from_utf8_lossy(line).into());
        Ok(Name { module, name })
    }

    /// The part of the stack above the last mark begins here.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Step<Id> {
        match self.stack.len() > self.floor() {
            true => Ok(self.stack[self.stack.len() - 1]),
            false => Err(PickleFault::Underflow),
        }
    }

    fn top_value(&mut self) -> Step<&mut Value> {
        let top = self.top()?;
        Ok(&mut self.values[top.0 as usize])
    }

    fn pop(&mut self) -> Step<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        let at = self.marks.pop().ok_or(PickleFault::NoMark)?;
        Ok(self.stack.split_off(at))
    }

    fn put(&mut self, id: Id) -> Step<()> {
        if self.stack.len() == STACK_MAX {
            return Err(PickleFault::TooMany { what: "values on its stack", max: STACK_MAX });
        }
        self.stack.push(id);
        Ok(())
    }

    fn push(&mut self, value: Value) -> Step<()> {
        let id = self.keep(value)?;
        self.put(id)
    }

    fn keep(&mut self, value: Value) -> Step<Id> {
        if self.values.len() == VALUES_MAX {
            return Err(PickleFault::TooMany { what: "values", max: VALUES_MAX });
        }
        self.values.push(value);
        Ok(Id(self.values.len() as u32 - 1))
    }

    fn memoize(&mut self, index: u64) -> Step<()> {
        let top = self.top()?;
        if self.memo.len() == MEMO_MAX {
            return Err(PickleFault::TooMany { what: "entries in its memo", max: MEMO_MAX });
        }
        self.memo.insert(index, top);
        Ok(())
    }

    fn recall(&mut self, index: u64) -> Step<()> {
        let id = *self.memo.get(&index).ok_or(PickleFault::Memo { index })?;
        self.put(id)
    }

    fn push_decimal(&mut self, digits: &[u8]) -> Step<()> {
        if digits.len() > DIGITS_MAX {
            return Err(PickleFault::TooMany { what: "digits of an integer", max: DIGITS_MAX });
        }
        let text =
            std::str::from_utf8(digits).map_err(|_| PickleFault::Operand { what: "an integer in text" })?;
        if let Ok(int) = text.parse() {
            return self.push(Value::Int(int));
        }
        let (sign, magnitude) = match text.strip_prefix('-') {
            Some(magnitude) => (true, magnitude),
            None => (false, text),
        };
        let mut bytes: Vec<u8> = Vec::new();
        for digit in magnitude.chars() {
            let digit = digit.to_digit(10).ok_or(PickleFault::Operand { what: "an integer in text" })?;
            let carry = bytes.iter_mut().fold(digit, |carry, byte| {
                let next = u32::from(*byte) * 10 + carry;
                *byte = next as u8;
                next >> 8
            });
            bytes.extend((carry > 0).then_some(carry as u8));
        }
        if magnitude.is_empty() {
            return Err(PickleFault::Operand { what: "an integer in text" });
        }
        bytes.push(0);
        if sign {
            let mut carry = true;
            for byte in &mut bytes {
                (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
            }
        }
        self.push(long(&bytes))
    }

    fn push_long(&mut self, len: u64) -> Step<()> {
        let bytes = self.take(len)?;
        self.push(long(bytes))
    }

    fn push_text(&mut self, len: u64) -> Step<()> {
        let text = String::from_utf8_lossy(self.take(len)?);
        self.push(Value::Text(text.into()))
    }

    fn push_bytes(&mut self, len: u64) -> Step<()> {
        let bytes = self.take(len)?;
        self.push(Value::Bytes(bytes.into()))
    }

    /// A string of Python 2, which did not tell text from bytes.
    fn push_old_string(&mut self, bytes: &[u8]) -> Step<()> {
        let value = match std::str::from_utf8(bytes) {
            Ok(text) => Value::Text(text.into()),
            Err(_) => Value::Bytes(bytes.into()),
        };
        self.push(value)
    }

    fn push_global(&mut self, name: Name) -> Step<()> {
        if name.is_refused() {
            return Err(PickleFault::Refused { name: name.to_string() });
        }
        self.push(Value::Global(Box::new(name)))
    }

    fn push_object(&mut self, callee: Id, args: Id) -> Step<()> {
        let object = Object { callee, args, state: None, items: Vec::new(), pairs: Vec::new() };
        self.push(Value::Object(Box::new(object)))
    }

    fn push_old_object(&mut self, name: Name, args: Vec<Id>) -> Step<()> {
        if !name.is_plain() {
            return Err(PickleFault::Refused { name: name.to_string() });
        }
        let callee = self.keep(Value::Global(Box::new(name)))?;
        let args = self.keep(Value::Tuple(args.into()))?;
        self.push_object(callee, args)
    }

    fn extend(&mut self, items: &[Id]) -> Step<()> {
        match self.top_value()? {
            Value::List(all) => all.extend(items),
            Value::Object(object) => object.items.extend(items),
            _ => return Err(PickleFault::Operand { what: "a list" }),
        }
        Ok(())
    }

    fn set(&mut self, pairs: Vec<(Id, Id)>) -> Step<()> {
        match self.top_value()? {
            Value::Dict(all) => all.extend(pairs),
            Value::Object(object) => object.pairs.extend(pairs),
            _ => return Err(PickleFault::Operand { what: "a map" }),
        }
        Ok(())
    }
}

fn paired(items: &[Id]) -> Step<Vec<(Id, Id)>> {
    match items.as_chunks() {
        (pairs, []) => Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect()),
        _ => Err(PickleFault::Operand { what: "keys and values in pairs" }),
    }
}

/// An integer in little-endian two's complement.
fn long(bytes: &[u8]) -> Value {
    let sign = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xff } else { 0 };
    let mut bytes = bytes;
    while let [rest @ .., next, last] = bytes {
        if *last != sign || (next & 0x80 != 0) != (sign != 0) {
            break;
        }
        bytes = &bytes[..rest.len() + 1];
    }
    if bytes.len() > 8 {
        return Value::Long(bytes.into());
    }
    let mut word = [sign; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(word))
}

/// Latin-1, but for `\uXXXX` and `\UXXXXXXXX`.
fn raw_unicode(line: &[u8]) -> String {
    let mut text = String::new();
    let mut at = 0;
    while at < line.len() {
        let digits = match line.get(at..at + 2) {
            Some(b"\\u") => 4,
            Some(b"\\U") => 8,
            _ => 0,
        };
        let escaped = line.get(at + 2..at + 2 + digits).filter(|_| digits > 0);
        let number = escaped
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u32::from_str_radix(digits, 16).ok());
        match number {
            Some(number) => {
                text.push(char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER));
                at += 2 + digits;
            }
            None => {
                text.push(char::from(line[at]));
                at += 1;
            }
        }
    }
    text
}

/// A string as Python writes it in source.
fn unquote(line: &[u8]) -> Option<Vec<u8>> {
    let line = line.trim_ascii();
    let inner = match line {
        [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => inner,
        _ => return None,
    };
    let mut bytes = Vec::new();
    let mut rest = inner;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        if *byte != b'\\' {
            bytes.push(*byte);
            continue;
        }
        let [escape, tail @ ..] = rest else { return None };
        rest = tail;
        bytes.push(match escape {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'x' => {
                let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
                rest = &rest[2..];
                u8::from_str_radix(digits, 16).ok()?
            }
            b'\\' | b'\'' | b'"' => *escape,
            _ => return None,
        });
    }
    Some(bytes)
}

#[cfg(test)]
#[path = "pickle/tests.rs"]
mod tests;
