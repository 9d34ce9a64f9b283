use super::*;

fn fault(input: &[u8]) -> PickleFault {
    Pickle::parse(input).unwrap_err().fault
}

fn root(input: &[u8]) -> String {
    let pickle = Pickle::parse(input).unwrap();
    show(&pickle, pickle.root())
}

/// As Python writes it, more or less.
fn show(pickle: &Pickle, id: Id) -> String {
    let list = |items: &[Id]| items.iter().map(|item| show(pickle, *item)).collect::<Vec<_>>().join(", ");
    let map = |pairs: &[(Id, Id)]| {
        let pair = |(key, value): &(Id, Id)| format!("{}: {}", show(pickle, *key), show(pickle, *value));
        pairs.iter().map(pair).collect::<Vec<_>>().join(", ")
    };
    match pickle.value(id) {
        Value::None => "None".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Long(bytes) => format!("{bytes:x?}"),
        Value::Float(value) => format!("{value:?}"),
        Value::Text(text) => format!("{text:?}"),
        Value::Bytes(bytes) => format!("{bytes:x?}"),
        Value::Tuple(items) => format!("({})", list(items)),
        Value::List(items) => format!("[{}]", list(items)),
        Value::Set(items) => format!("{{{}}}", list(items)),
        Value::Dict(pairs) => format!("{{{}}}", map(pairs)),
        Value::Global(name) => name.to_string(),
        Value::Persistent(of) => format!("storage{}", show(pickle, *of)),
        Value::Object(object) => format!("{}{}", show(pickle, object.callee), show(pickle, object.args)),
    }
}

/// What CPython's `pickle.dumps` gives for `{"a": [1, -2, 300, 2**31, 2**70, None, True], "b": (1.5, "é", b"x")}`, protocols
/// 0, 2 and 4, and what it means.
#[test]
fn protocols_have_the_same_values() {
    let zero: &[u8] = b"(dp0\nVa\np1\n(lp2\nI1\naI-2\naI300\naL2147483648L\naL1180591620717411303424L\naNaI01\nasVb\np3\n(F1.5\nV\xe9\np4\nc_codecs\nencode\np5\n(Vx\np6\nVlatin1\np7\ntp8\nRp9\ntp10\ns.";
    let two: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM\x2c\x01\x8a\x05\x00\x00\x00\x80\x00\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40N\x88eX\x01\x00\x00\x00bq\x03G?\xf8\x00\x00\x00\x00\x00\x00X\x02\x00\x00\x00\xc3\xa9q\x04c_codecs\nencode\nq\x05X\x01\x00\x00\x00xq\x06X\x06\x00\x00\x00latin1q\x07\x86q\x08Rq\x09\x87q\x0au.";
    let four: &[u8] = b"\x80\x04\x95\x43\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM\x2c\x01\x8a\x05\x00\x00\x00\x80\x00\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40N\x88e\x8c\x01b\x94G?\xf8\x00\x00\x00\x00\x00\x00\x8c\x02\xc3\xa9\x94C\x01x\x94\x87\x94u.";
    let list = r#""a": [1, -2, 300, 2147483648, [0, 0, 0, 0, 0, 0, 0, 0, 40], None, true]"#;
    let encoded = format!(r#"{{{list}, "b": (1.5, "é", _codecs.encode("x", "latin1"))}}"#);
    assert_eq!(root(zero), encoded);
    assert_eq!(root(two), encoded);
    assert_eq!(root(four), format!(r#"{{{list}, "b": (1.5, "é", [78])}}"#));
}

#[test]
fn a_tensor_of_torch_is_a_call_that_did_not_take_place() {
    let tensor = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nFloatStorage\nq\x02\
        X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04K\x06tq\x05QK\x00K\x02K\x03\x86q\x06K\x03K\x01\x86q\x07\x89\
        ccollections\nOrderedDict\nq\x08)Rq\x09tq\x0aRq\x0b.";
    assert_eq!(
        root(tensor),
        r#"torch._utils._rebuild_tensor_v2(storage("storage", torch.FloatStorage, "0", "cpu", 6), 0, (2, 3), (3, 1), false, collections.OrderedDict())"#
    );
}

#[test]
fn what_is_shared_in_a_pickle_is_shared_here() {
    let pickle = Pickle::parse(b"\x80\x04]\x94K\x01ah\x00\x86.").unwrap();
    let [one, other] = pickle.sequence(pickle.root()).unwrap() else { panic!("two") };
    assert_eq!(one, other);
}

#[test]
fn names_that_run_code_are_refused_wherever_they_stand() {
    let refused = |name: &str| PickleFault::Refused { name: name.to_owned() };
    assert_eq!(fault(b"cos\nsystem\n."), refused("os.system"));
    assert_eq!(fault(b"}(K\x01cposix\nsystem\nu."), refused("posix.system"));
    assert_eq!(fault(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93."), refused("builtins.eval"));
    assert_eq!(fault(b"(S'true'\nios\nsystem\n."), refused("os.system"));
    assert_eq!(fault(b"(cany.module\nClass\no."), refused("any.module.Class"));
    assert_eq!(fault(b"cos.path\njoin\n."), refused("os.path.join"));
    assert_eq!(fault(b"\x82\x01."), refused("a code of copyreg's registry"));
    assert_eq!(root(b"cbuiltins\nset\n(l\x85R."), "builtins.set([])");
    assert_eq!(root(b"(ccollections\nOrderedDict\no."), "collections.OrderedDict()");
}

#[test]
fn claims_and_rules_are_checked() {
    assert_eq!(fault(b""), PickleFault::Ends);
    assert_eq!(fault(b"\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x10."), PickleFault::Ends);
    assert_eq!(fault(b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x40."), PickleFault::Ends);
    assert_eq!(fault(b"\x80\x09."), PickleFault::Protocol { found: 9 });
    assert_eq!(fault(b"\xff."), PickleFault::Opcode { found: 0xff });
    assert_eq!(fault(b"0."), PickleFault::Underflow);
    assert_eq!(fault(b"K\x01(\x85."), PickleFault::Underflow);
    assert_eq!(fault(b"t."), PickleFault::NoMark);
    assert_eq!(fault(b"h\x07."), PickleFault::Memo { index: 7 });
    assert_eq!(fault(b"K\x01K\x02a."), PickleFault::Operand { what: "a list" });
    assert_eq!(fault(b"(K\x01d."), PickleFault::Operand { what: "keys and values in pairs" });
    let marks = PickleFault::TooMany { what: "containers in each other", max: DEPTH_MAX };
    assert_eq!(fault(&b"(".repeat(DEPTH_MAX + 1)), marks);
    let stack = PickleFault::TooMany { what: "values on its stack", max: STACK_MAX };
    assert_eq!(fault(&[b"N", &b"2".repeat(STACK_MAX)[..]].concat()), stack);
    let digits = [&b"L"[..], &b"1".repeat(DIGITS_MAX + 1), b"L\n."].concat();
    assert_eq!(fault(&digits), PickleFault::TooMany { what: "digits of an integer", max: DIGITS_MAX });
}

/// A hundred thousand lists in each other neither overflow the stack when they are made nor when they go.
#[test]
fn depth_costs_no_recursion() {
    let deep = [&b"]".repeat(100_000)[..], &b"a".repeat(99_999), b"."].concat();
    assert_eq!(Pickle::parse(&deep).unwrap().values.len(), 100_000);
}

#[test]
fn integers_are_in_twos_complement() {
    for (input, expected) in [
        (&b"\x8a\x00."[..], "0"),
        (b"\x8a\x05\x00\x00\x00\x80\x00.", "2147483648"),
        (b"\x8a\x01\xff.", "-1"),
        (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff.", "-1"),
        (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", "-9223372036854775808"),
        (b"L-18446744073709551616L\n.", "[0, 0, 0, 0, 0, 0, 0, 0, ff]"),
        (b"J\x00\x00\x00\x80.", "-2147483648"),
        (b"M\xff\xff.", "65535"),
    ] {
        assert_eq!(root(input), expected, "{}", input.escape_ascii());
    }
}
