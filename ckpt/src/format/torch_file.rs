//! What `torch.save` writes: a ZIP archive of stored records, one of them a pickle that says which tensors lie where in the
//! others. Only the central directory is believed, and never more than there are bytes.

use super::ForeignError;
use super::pickle::{Id, Name, PICKLE_BYTES_MAX, Pickle, PickleError, PickleFault, Value};
use crate::store::Store;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use mesh::{DType, Shape};
use std::collections::BTreeMap;
use std::ops::Range;

/// The end of an archive that is read at once: its end records with the longest comment.
const TAIL_BYTES: u64 = 66 << 10;
/// Bytes of the longest central directory.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;
/// How often a view may repeat each byte of its storage: a few bytes must not claim what no memory holds.
const REPEATS_MAX: u64 = 1 << 16;

/// The first read of a file of the old format.
const HEAD_BYTES: u64 = 1 << 20;
/// The number that such a file begins with.
const STREAM_MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// An opened archive.
pub(super) struct TorchFile {
    /// With the store's name.
    name: String,
    records: BTreeMap<String, Record>,
    pub(super) pickle: Pickle,
}

struct Record {
    /// In the file.
    bytes: Range<u64>,
    crc32: u32,
}

/// Elements in a file: element (i, j, …) is number `first` + i·`strides[0]` + j·`strides[1]` + … of the storage.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    /// The storage in the file: more than the elements, as a rule of views.
    pub(super) storage: Range<u64>,
    /// CRC-32 of the storage; none where it was not computed.
    pub(super) crc32: Option<u32>,
    pub(super) first: u64,
    pub(super) strides: Vec<u64>,
}

pub(super) fn crc32(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

/// Some bytes of a file, of which the end was read already.
struct Part<'a> {
    store: &'a Store,
    path: &'a str,
    bytes: Range<u64>,
    tail: Bytes,
}

impl Part<'_> {
    /// `range` counts from the start of the part, and lies in it.
    fn read(&self, range: Range<u64>) -> Result<Bytes, ForeignError> {
        let tail_at = self.bytes.end - self.bytes.start - self.tail.len() as u64;
        match range.start.checked_sub(tail_at) {
            Some(start) => Ok(self.tail.slice(start as usize..(range.end - tail_at) as usize)),
            None => {
                let at = self.bytes.start;
                super::read_range(self.store, self.path, at + range.start..at + range.end)
            }
        }
    }
}

impl TorchFile {
    /// Opens the archive that `bytes` of a file are; what lies in the file must be known to be that long.
    pub(super) fn open(store: &Store, path: &str, bytes: Range<u64>) -> Result<TorchFile, ForeignError> {
        let name = store.full_name(path);
        let fault = |fault: &str| ForeignError::File { object: name.clone(), fault: fault.to_owned() };
        let len = bytes.end - bytes.start;
        let tail = super::read_range(store, path, bytes.end - len.min(TAIL_BYTES)..bytes.end)?;
        let part = Part { store, path, bytes: bytes.clone(), tail };
        let (directory, num_entries) = find_directory(&part.tail, len)
            .ok_or_else(|| fault("a ZIP archive ends with its directory, and there is none"))?;
        let directory = part.read(directory)?;
        let mut records = BTreeMap::new();
        let mut rest = &directory[..];
        let mut is_compressed = false;
        for _ in 0..num_entries {
            let (entry, next) = read_entry(rest).ok_or_else(|| fault("its directory is not whole"))?;
            rest = next;
            is_compressed |= !entry.is_stored;
            let header = entry.header..entry.header.saturating_add(30);
            let header = (header.end <= len).then(|| part.read(header)).transpose()?;
            let header = header.filter(|header| header.starts_with(b"PK\x03\x04"));
            let header = header.ok_or_else(|| fault("a record is not where its directory says"))?;
            let start = entry.header + 30 + le(&header[26..28]) + le(&header[28..30]);
            let end = start.checked_add(entry.bytes).filter(|end| *end <= len);
            let end = end.ok_or_else(|| fault("a record reaches past its end"))?;
            let record = Record { bytes: bytes.start + start..bytes.start + end, crc32: entry.crc32 };
            if records.insert(entry.name, record).is_some() {
                return Err(fault("two records have one name"));
            }
        }
        let (pickle, folder) =
            match records.keys().find_map(|name| Some((name, name.strip_suffix("data.pkl")?))) {
                Some((name, folder)) => (name.clone(), folder.to_owned()),
                None => return Err(fault("it has no `data.pkl`, so it is none that `torch.save` wrote")),
            };
        if records.contains_key(&format!("{folder}constants.pkl")) {
            return Err(fault("it is a program of TorchScript, not a checkpoint; save its `state_dict()`"));
        }
        if is_compressed {
            return Err(fault(
                "its records are compressed or encrypted, which those of `torch.save` never are",
            ));
        }
        let read =
            |record: &Record| part.read(record.bytes.start - bytes.start..record.bytes.end - bytes.start);
        if let Some(order) = records.get(&format!("{folder}byteorder"))
            && (order.bytes.end - order.bytes.start > 16 || read(order)? != b"little"[..])
        {
            return Err(fault("its byte order is not `little`, and others are not read"));
        }
        let record = &records[&pickle];
        if record.bytes.end - record.bytes.start > PICKLE_BYTES_MAX {
            return Err(fault("its `data.pkl` is above the limit of 256 MiB"));
        }
        let text = read(record)?;
        if crc32(&text) != record.crc32 && record.crc32 != 0 {
            return Err(fault("its `data.pkl` is damaged: the CRC-32 is another one"));
        }
        let pickle =
            Pickle::parse(&text).map_err(|source| ForeignError::Pickle { object: name.clone(), source })?;
        let strip = |(name, record): (String, Record)| Some((name.strip_prefix(&folder)?.to_owned(), record));
        let records = records.into_iter().filter_map(strip).collect();
        Ok(TorchFile { name, records, pickle })
    }

    /// Opens a file of the format before archives: five pickles, the third of which is the value, then the storages in the
    /// order of the list that the last one is.
    pub(super) fn open_stream(store: &Store, path: &str, file_bytes: u64) -> Result<TorchFile, ForeignError> {
        let name = store.full_name(path);
        let fault = |fault: &str| ForeignError::File { object: name.clone(), fault: fault.to_owned() };
        // The pickles have no length: more is read until they are whole.
        let mut head_bytes = HEAD_BYTES.min(file_bytes);
        let (pickle, keys, mut at) = loop {
            let head = super::read_range(store, path, 0..head_bytes)?;
            match read_pickles(&head) {
                Err(error)
                    if error.fault == PickleFault::Ends && head_bytes < file_bytes.min(PICKLE_BYTES_MAX) =>
                {
                    head_bytes = (head_bytes * 4).min(file_bytes).min(PICKLE_BYTES_MAX);
                }
                Err(source) => return Err(ForeignError::Pickle { object: name, source }),
                Ok(found) => {
                    break found.ok_or_else(|| fault("it is a pickle, but none that `torch.save` wrote"))?;
                }
            }
        };
        // The list of storages has no sizes; where they are used, it says of what type they are.
        let mut widths = BTreeMap::new();
        for storage in pickle.persistent().filter_map(|id| pickle.sequence(id)) {
            let [_, class, key, ..] = storage else { continue };
            let width =
                pickle.global(*class).map(|class| dtype_of_storage(&class.name).map_or(1, DType::size_bytes));
            if let (Some(key), Some(width)) = (pickle.text(*key), width) {
                widths.insert(key.to_owned(), width as u64);
            }
        }
        let mut records = BTreeMap::new();
        for key in keys {
            let width = *widths.get(&key).ok_or_else(|| fault("a storage belongs to no tensor"))?;
            let start = at.checked_add(8).filter(|start| *start <= file_bytes);
            let start = start.ok_or_else(|| fault("its storages reach past its end"))?;
            let numel = le(&super::read_range(store, path, at..start)?);
            let end = numel.checked_mul(width).and_then(|bytes| start.checked_add(bytes));
            at = end
                .filter(|end| *end <= file_bytes)
                .ok_or_else(|| fault("its storages reach past its end"))?;
            // Without a checksum, as if it was not computed.
            records.insert(format!("data/{key}"), Record { bytes: start..at, crc32: 0 });
        }
        Ok(TorchFile { name, records, pickle })
    }

    /// The tensor that `id` is, if it is one.
    pub(super) fn view(&self, id: Id) -> Result<Option<View>, ForeignError> {
        self.read_view(id).map_err(|fault| ForeignError::File { object: self.name.clone(), fault })
    }

    /// The ranges of the storages, with their checksums.
    pub(super) fn storages(&self) -> impl Iterator<Item = (Range<u64>, Option<u32>)> {
        let storages = self.records.iter().filter(|(name, _)| name.starts_with("data/"));
        storages.map(|(_, record)| (record.bytes.clone(), record.known_crc32()))
    }

    fn read_view(&self, id: Id) -> Result<Option<View>, String> {
        let pickle = &self.pickle;
        let Some((callee, object)) = pickle.call(id).filter(|(name, _)| &*name.module == "torch._utils")
        else {
            return Ok(None);
        };
        let args = pickle.sequence(object.args).ok_or("a tensor without arguments")?;
        let (storage, first, shape, strides, dtype) = match (&*callee.name, args) {
            // A parameter holds a tensor, and is at most one deep in another.
            ("_rebuild_parameter", [tensor, ..]) => {
                let inner = pickle.call(*tensor).map(|(name, _)| &*name.name);
                if inner == Some("_rebuild_parameter") {
                    return Err("a parameter of a parameter".to_owned());
                }
                return self.read_view(*tensor);
            }
            ("_rebuild_tensor_v2", [storage, first, shape, strides, ..]) => {
                (storage, first, shape, strides, None)
            }
            ("_rebuild_tensor_v3", [storage, first, shape, strides, _, _, dtype, ..]) => {
                (storage, first, shape, strides, Some(dtype))
            }
            _ => return Err(format!("`{callee}` makes a tensor of a kind that is not read")),
        };
        let storage = match pickle.value(*storage) {
            Value::Persistent(storage) => pickle.sequence(*storage),
            _ => None,
        };
        let Some([kind, class, record, _, numel, ..]) = storage else {
            return Err("a tensor without a storage".to_owned());
        };
        let class = pickle.global(*class).filter(|_| pickle.text(*kind) == Some("storage"));
        let class = class.ok_or("a storage of no class")?;
        let (dtype, unit) = match dtype {
            Some(dtype) => {
                let dtype = pickle.global(*dtype).and_then(dtype_of).ok_or("an unknown element type")?;
                (dtype, 1)
            }
            None => {
                let dtype = dtype_of_storage(&class.name).filter(|_| &*class.module == "torch");
                let dtype =
                    dtype.ok_or_else(|| format!("`{class}` is a storage of no known element type"))?;
                (dtype, dtype.size_bytes() as u64)
            }
        };
        let (shape, strides) = (naturals(pickle, *shape)?, naturals(pickle, *strides)?);
        let first = natural(pickle, *first)?;
        if shape.len() != strides.len() {
            return Err(format!("a shape of {} dims with strides of {}", shape.len(), strides.len()));
        }
        let record = pickle.text(*record).ok_or("a storage without a name")?;
        let stored = self.records.get(&format!("data/{record}"));
        let stored =
            stored.ok_or_else(|| format!("a tensor lies in record `data/{record}`, which is not there"))?;
        let bytes = stored.bytes.end - stored.bytes.start;
        let claimed = natural(pickle, *numel)?.checked_mul(unit);
        if claimed != Some(bytes) {
            return Err(format!(
                "record `data/{record}` has {bytes} bytes, which are not those of its storage"
            ));
        }
        let view = View {
            dtype,
            shape: Shape::new(&shape),
            storage: stored.bytes.clone(),
            crc32: stored.known_crc32(),
            first,
            strides,
        };
        match view.fits() {
            true => Ok(Some(view)),
            false => Err(format!("a tensor of {} reaches past the {bytes} bytes of its storage", view.shape)),
        }
    }
}

impl Record {
    /// Writers may leave the checksum out; then it is 0.
    fn known_crc32(&self) -> Option<u32> {
        (self.crc32 != 0 || self.bytes.is_empty()).then_some(self.crc32)
    }
}

impl View {
    /// Whether every element lies in the storage, and few enough are repeated.
    fn fits(&self) -> bool {
        let (width, bytes) = (self.dtype.size_bytes() as u64, self.storage.end - self.storage.start);
        if self.shape.dims().contains(&0) {
            return true;
        }
        let last =
            self.shape.dims().iter().zip(&self.strides).try_fold(self.first, |last, (extent, stride)| {
                last.checked_add((extent - 1).checked_mul(*stride)?)
            });
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(width));
        let all = self.shape.dims().iter().try_fold(width, |all, extent| all.checked_mul(*extent));
        end.is_some_and(|end| end <= bytes) && all.is_some_and(|all| all / REPEATS_MAX <= bytes)
    }
}

fn natural(pickle: &Pickle, id: Id) -> Result<u64, String> {
    let found = pickle.int(id).and_then(|int| u64::try_from(int).ok());
    found.ok_or_else(|| format!("{} where a number from 0 is needed", pickle.describe(id)))
}

/// The numbers of a tuple, or of a `torch.Size`.
pub(super) fn naturals(pickle: &Pickle, id: Id) -> Result<Vec<u64>, String> {
    let items = match pickle.call(id) {
        Some((name, size)) if name.is("torch", "Size") => {
            pickle.sequence(size.args).and_then(|args| pickle.sequence(*args.first()?))
        }
        _ => pickle.sequence(id),
    };
    let items = items.ok_or_else(|| format!("{} where numbers are needed", pickle.describe(id)))?;
    items.iter().map(|item| natural(pickle, *item)).collect()
}

/// The element type that torch has under this name.
pub(super) fn dtype_of(name: &Name) -> Option<DType> {
    if &*name.module != "torch" {
        return None;
    }
    Some(match &*name.name {
        "float64" | "double" => DType::F64,
        "float32" | "float" => DType::F32,
        "float16" | "half" => DType::F16,
        "bfloat16" => DType::Bf16,
        "int64" | "long" => DType::I64,
        "int32" | "int" => DType::I32,
        "int16" | "short" => DType::I16,
        "int8" => DType::I8,
        "uint64" => DType::U64,
        "uint32" => DType::U32,
        "uint16" => DType::U16,
        "uint8" => DType::U8,
        "bool" => DType::Bool,
        "complex32" | "chalf" => DType::C32,
        "complex64" | "cfloat" => DType::C64,
        "complex128" | "cdouble" => DType::C128,
        "float8_e4m3fn" => DType::F8E4M3,
        "float8_e5m2" => DType::F8E5M2,
        "float8_e4m3fnuz" => DType::F8E4M3Fnuz,
        "float8_e5m2fnuz" => DType::F8E5M2Fnuz,
        _ => return None,
    })
}

fn dtype_of_storage(class: &str) -> Option<DType> {
    Some(match class {
        "DoubleStorage" => DType::F64,
        "FloatStorage" => DType::F32,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::Bf16,
        "LongStorage" => DType::I64,
        "IntStorage" => DType::I32,
        "ShortStorage" => DType::I16,
        "CharStorage" => DType::I8,
        "ByteStorage" => DType::U8,
        "BoolStorage" => DType::Bool,
        "ComplexFloatStorage" => DType::C64,
        "ComplexDoubleStorage" => DType::C128,
        _ => return None,
    })
}

/// The value, the names of the storages, and the bytes of all five pickles; none if the first is not torch's number.
fn read_pickles(head: &[u8]) -> Result<Option<(Pickle, Vec<String>, u64)>, PickleError> {
    let mut at = 0;
    let mut next = || {
        let pickle = Pickle::parse(&head[at..]);
        let pickle = pickle.map_err(|error| PickleError { at: error.at + at as u64, ..error })?;
        at += pickle.len;
        Ok(pickle)
    };
    let number = next()?;
    if !matches!(number.value(number.root()), Value::Long(bytes) if **bytes == STREAM_MAGIC) {
        return Ok(None);
    }
    let (_version, _sizes, value, keys) = (next()?, next()?, next()?, next()?);
    let names = keys.sequence(keys.root()).unwrap_or_default();
    let names = names.iter().filter_map(|name| keys.text(*name).map(str::to_owned)).collect();
    Ok(Some((value, names, at as u64)))
}

/// An unsigned number in little-endian bytes.
fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Where the central directory lies in an archive of `len` bytes that ends with `tail`, and its number of entries.
fn find_directory(tail: &[u8], len: u64) -> Option<(Range<u64>, u64)> {
    let is_end = |at: &usize| {
        tail[*at..].starts_with(b"PK\x05\x06")
            && *at as u64 + 22 + le(&tail[at + 20..at + 22]) == tail.len() as u64
    };
    let at = (0..=tail.len().checked_sub(22)?).rev().find(is_end)?;
    let end = &tail[at..];
    let (mut entries, mut bytes, mut start) = (le(&end[10..12]), le(&end[12..16]), le(&end[16..20]));
    let mut limit = len - (tail.len() - at) as u64;
    let locator =
        at.checked_sub(20).map(|at| &tail[at..]).filter(|locator| locator.starts_with(b"PK\x06\x07"));
    if let Some(locator) = locator {
        let record_at = le(&locator[8..16]);
        let in_tail =
            record_at.checked_sub(len - tail.len() as u64).and_then(|at| usize::try_from(at).ok())?;
        let record = tail.get(in_tail..)?.get(..56).filter(|record| record.starts_with(b"PK\x06\x06"))?;
        (entries, bytes, start) = (le(&record[32..40]), le(&record[40..48]), le(&record[48..56]));
        limit = record_at;
    }
    let end = start.checked_add(bytes).filter(|end| *end <= limit && bytes <= DIRECTORY_BYTES_MAX)?;
    Some((start..end, entries))
}

struct Entry {
    name: String,
    crc32: u32,
    /// As they lie in the archive.
    bytes: u64,
    header: u64,
    /// Neither compressed nor encrypted.
    is_stored: bool,
}

/// An entry of the directory, and what follows it; none if it is cut short.
fn read_entry(directory: &[u8]) -> Option<(Entry, &[u8])> {
    let fixed = directory.get(..46).filter(|fixed| fixed.starts_with(b"PK\x01\x02"))?;
    let [name_len, extra_len, comment_len] = [28, 30, 32].map(|at| le(&fixed[at..at + 2]) as usize);
    let rest = directory.get(46 + name_len + extra_len + comment_len..)?;
    let name = String::from_utf8_lossy(&directory[46..46 + name_len]).into_owned();
    let (mut packed, mut bytes, mut header) = (le(&fixed[20..24]), le(&fixed[24..28]), le(&fixed[42..46]));
    let mut extra = &directory[46 + name_len..46 + name_len + extra_len];
    while let Some(head) = extra.get(..4) {
        let mut field = extra.get(4..4 + le(&head[2..4]) as usize)?;
        extra = &extra[4 + field.len()..];
        if le(&head[..2]) == 1 {
            // The fields that do not fit, in this order.
            for value in [&mut bytes, &mut packed, &mut header] {
                if *value == u64::from(u32::MAX) {
                    *value = le(field.get(..8)?);
                    field = &field[8..];
                }
            }
        }
    }
    let is_stored = le(&fixed[10..12]) == 0 && fixed[8] & 1 == 0 && packed == bytes;
    Some((Entry { name, crc32: le(&fixed[16..20]) as u32, bytes: packed, header, is_stored }, rest))
}
