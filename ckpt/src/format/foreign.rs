//! `ForeignCheckpoint`: tensors of other software's files as boxes of elements, wherever and with whatever strides they lie.

use super::dcp;
use super::pickle::{Id, Pickle, PickleError, Value};
use super::safetensors::{SafetensorsError, SafetensorsFolder};
use super::torch_file::{TorchFile, View, crc32};
use crate::scatter::{BoxIn, copy_box};
use crate::store::{LocationError, Store, StoreError};
use bytes::Bytes;
use mesh::{DType, Region, Shape, TensorKey, TilingFault, prove_tiling};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Bytes of one read, and of the largest storage that is read whole.
const READ_BYTES: u64 = 16 << 20;
/// Bytes between wanted elements that are rather read than asked for separately.
const GAP_BYTES_MAX: u64 = 1 << 20;
/// Maps and lists in each other, on the way to a tensor.
const DEPTH_MAX: usize = 64;
/// Values that are looked at in search of tensors; a value that many others name counts each time.
const VISITS_MAX: usize = 10_000_000;

/// A checkpoint that other software wrote, opened: what it holds, and where. Opening reads descriptions alone.
#[derive(Debug)]
pub struct ForeignCheckpoint {
    store: Store,
    format: ForeignFormat,
    tensors: BTreeMap<TensorKey, ForeignTensor>,
    objects: Vec<Object>,
    /// The storage that was read last: views of one follow each other.
    last: Mutex<Option<ReadStorage>>,
}

/// File, bytes in it, and what they are.
type ReadStorage = (Arc<str>, Range<u64>, Bytes);

/// Whose files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignFormat {
    /// A folder of PyTorch's distributed checkpoint.
    Dcp,
    /// The same, as Megatron-Core writes it.
    TorchDist,
    /// A file of `torch.save`.
    TorchSave,
    /// Files of safetensors.
    Safetensors,
}

/// One tensor; its chunks tile it.
#[derive(Debug)]
pub struct ForeignTensor {
    /// Element type.
    pub dtype: DType,
    /// Elements per dim.
    pub shape: Shape,
    pub(super) chunks: Vec<Chunk>,
}

#[derive(Debug)]
pub(super) struct Chunk {
    /// In elements of the whole tensor.
    pub(super) region: Region,
    pub(super) place: Place,
}

#[derive(Debug)]
pub(super) enum Place {
    View {
        path: Arc<str>,
        view: View,
    },
    /// A file of `torch.save` within a file, which holds one tensor, the chunk.
    Item(Item),
}

/// A file of `torch.save` within a file.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) path: Arc<str>,
    pub(super) bytes: Range<u64>,
}

/// Something that is no tensor.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) item: Item,
}

/// Why files of other software cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// There is no such file or folder.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Safetensors break a rule.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A pickle is none that is read.
    #[error("`{object}` cannot be read")]
    Pickle {
        /// With the store's name.
        object: String,
        /// Where, and why.
        source: PickleError,
    },
    /// A file is not what its format says.
    #[error("`{object}`: {fault}")]
    File {
        /// With the store's name.
        object: String,
        /// What is wrong.
        fault: String,
    },
    /// A tensor, or another value, is not where or what it is said to be.
    #[error("{}`{object}`: {fault}", if .key.is_empty() { String::new() } else { format!("`{key}` of ") })]
    Entry {
        /// Its name.
        key: String,
        /// The checkpoint.
        object: String,
        /// What is wrong.
        fault: String,
    },
    /// A tensor, or another value, lies in a file that cannot be read.
    #[error("`{key}` cannot be read")]
    Of {
        /// Its name.
        key: String,
        /// Why.
        source: Box<ForeignError>,
    },
    /// No format is known that looks like this.
    #[error("`{object}` is of no format that is known here")]
    Unknown {
        /// The file.
        object: String,
    },
}

impl ForeignTensor {
    /// Boxes that it is stored in; empty ones do not count.
    pub fn num_chunks(&self) -> usize {
        self.chunks.len()
    }
}

impl ForeignError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            ForeignError::Location(error) => error.code(),
            ForeignError::Store(error) if error.is_not_found() => "RM4003",
            ForeignError::Store(error) => error.code(),
            ForeignError::Safetensors(error) => error.code(),
            ForeignError::Pickle { source, .. } if source.is_refusal() => "RM4001",
            ForeignError::Pickle { .. } => "RM4002",
            ForeignError::File { .. } | ForeignError::Entry { .. } => "RM4003",
            ForeignError::Of { source, .. } => source.code(),
            ForeignError::Unknown { .. } => "RM4004",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ForeignError::Location(error) => error.help(),
            ForeignError::Store(error) => error.help(),
            ForeignError::Safetensors(error) => error.help(),
            ForeignError::Of { source, .. } => source.help(),
            ForeignError::Pickle { source, .. } if source.is_refusal() => {
                "do not load this file with `torch.load` either, unless you trust who made it".to_owned()
            }
            ForeignError::Unknown { .. } => "docs/formats.md lists what is read".to_owned(),
            _ => "the copy may be incomplete; fetch or save the checkpoint again".to_owned(),
        }
    }
}

pub(super) fn read_range(store: &Store, path: &str, range: Range<u64>) -> Result<Bytes, ForeignError> {
    let mut found = Bytes::new();
    if !range.is_empty() {
        store.get_ranges(std::iter::once((path.to_owned(), range)), |_, bytes| {
            found = bytes;
            Ok::<(), ForeignError>(())
        })?;
    }
    Ok(found)
}

/// The length of a file in `store`: one that is not there, is no file, or lies outside by a link is refused.
pub(super) fn file_bytes(store: &Store, path: &str) -> Result<u64, ForeignError> {
    let is_plain =
        path.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']));
    let fault = match is_plain {
        true => match store.file_within(path)? {
            Ok(bytes) => return Ok(bytes),
            Err(fault) => fault,
        },
        false => "its name leads out of the checkpoint",
    };
    Err(ForeignError::File { object: store.full_name(path), fault: fault.to_owned() })
}

impl ForeignCheckpoint {
    /// Opens what other software left at `location`, a local file or folder, by what it contains. `None`: nothing there is
    /// of other software.
    ///
    /// # Errors
    /// See [`ForeignError`].
    pub fn open(location: &str) -> Result<Option<ForeignCheckpoint>, ForeignError> {
        let path = Path::new(location);
        if path.is_file() {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let store = Store::open(&parent.unwrap_or(Path::new(".")).to_string_lossy())?;
            let name = path.file_name().expect("a file has a name").to_string_lossy();
            return open_file(store, &name).map(Some);
        }
        if !path.is_dir() {
            return Ok(None);
        }
        let store = Store::open(location)?;
        let names: BTreeSet<String> =
            store.entries()?.iter().filter_map(|entry| entry.name.to_str().map(str::to_owned)).collect();
        if names.contains(TRACKER) {
            let folder = dcp::tracked_folder(&store, TRACKER)?;
            return ForeignCheckpoint::open(&path.join(folder).to_string_lossy());
        }
        if names.contains(".metadata") || names.iter().any(|name| dcp::is_of_dcp(name)) {
            return dcp::open(store, &names).map(Some);
        }
        if names
            .iter()
            .any(|name| name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
        {
            let opened = SafetensorsFolder::open(&store)?;
            return of_safetensors(store, &opened).map(Some);
        }
        Ok(None)
    }

    /// Proves that chunks tile their tensors.
    pub(super) fn new(
        store: Store,
        format: ForeignFormat,
        tensors: Vec<(String, ForeignTensor)>,
        objects: Vec<Object>,
    ) -> Result<ForeignCheckpoint, ForeignError> {
        let mut by_key = BTreeMap::new();
        for (key, mut tensor) in tensors {
            let fault =
                |fault: String| ForeignError::Entry { key: key.clone(), object: store.to_string(), fault };
            let mut extents = tensor.shape.dims().iter().copied().chain([tensor.dtype.size_bytes() as u64]);
            let bytes = extents.try_fold(1u64, u64::checked_mul);
            if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
                return Err(fault(format!(
                    "its shape {} has more elements than can be counted",
                    tensor.shape
                )));
            }
            let whole = Region::whole(&tensor.shape);
            for Chunk { region, .. } in &tensor.chunks {
                if region.num_dims() != whole.num_dims() || !whole.contains(region) {
                    return Err(fault(format!("chunk {region} lies outside its shape {}", tensor.shape)));
                }
            }
            tensor.chunks.retain(|chunk| !chunk.region.is_empty());
            let regions: Vec<&Region> = tensor.chunks.iter().map(|chunk| &chunk.region).collect();
            prove_tiling(&tensor.shape, &regions).map_err(|found| {
                fault(match found {
                    TilingFault::Overlap { first, second, overlap } => {
                        format!("chunks {} and {} share {overlap}", regions[first], regions[second])
                    }
                    TilingFault::Outside { index } => format!("chunk {} lies outside", regions[index]),
                    TilingFault::Uncovered { missing } => format!("{missing} elements are in no chunk"),
                })
            })?;
            if by_key.insert(TensorKey::new(key.as_str()), tensor).is_some() {
                return Err(fault("two tensors have this name".to_owned()));
            }
        }
        Ok(ForeignCheckpoint { store, format, tensors: by_key, objects, last: Mutex::new(None) })
    }

    /// Whose files they are.
    pub fn format(&self) -> ForeignFormat {
        self.format
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<TensorKey, ForeignTensor> {
        &self.tensors
    }

    /// The names of what is stored beside tensors.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.objects.iter().map(|object| object.name.as_str())
    }

    /// Reads and checks what [`ForeignCheckpoint::read_box`] does not: objects, and storages of more than 16 MiB, whose
    /// checksum holds only for all of them. Memory does not grow with them.
    ///
    /// # Errors
    /// The first fault.
    pub fn check(&self) -> Result<(), ForeignError> {
        for Object { name, item } in &self.objects {
            let check = || {
                let file = TorchFile::open(&self.store, &item.path, item.bytes.clone())?;
                file.storages()
                    .try_for_each(|(storage, crc32)| self.check_storage(&item.path, storage, crc32))
            };
            check().map_err(|source| of(name, source))?;
        }
        for (key, tensor) in &self.tensors {
            for chunk in &tensor.chunks {
                let (path, view) = self.locate(key, tensor, chunk)?;
                if view.storage.end - view.storage.start > READ_BYTES {
                    let checked = self.check_storage(&path, view.storage, view.crc32);
                    checked.map_err(|source| of(key.as_str(), source))?;
                }
            }
        }
        Ok(())
    }

    fn check_storage(&self, path: &str, storage: Range<u64>, crc32: Option<u32>) -> Result<(), ForeignError> {
        let Some(expected) = crc32 else { return Ok(()) };
        let starts = storage.clone().step_by(READ_BYTES as usize);
        let ranges = starts.map(|start| (path.to_owned(), start..storage.end.min(start + READ_BYTES)));
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32IsoHdlc);
        self.store.get_ranges(ranges, |_, bytes| {
            digest.update(&bytes);
            Ok::<(), ForeignError>(())
        })?;
        match digest.finalize() as u32 {
            found if found == expected => Ok(()),
            found => Err(self.damaged(path, &storage, expected, found)),
        }
    }

    fn damaged(&self, path: &str, storage: &Range<u64>, expected: u32, found: u32) -> ForeignError {
        let fault = format!(
            "bytes {} to {} are damaged: their CRC-32 is {found:08x}, not {expected:08x}",
            storage.start, storage.end
        );
        ForeignError::File { object: self.store.full_name(path), fault }
    }

    /// Fills `out` with one box of the tensor `key`: row-major and little-endian. Reads what holds the box, and storages of up to
    /// 16 MiB whole, so that their checksum is compared.
    ///
    /// # Errors
    /// See [`ForeignError`]; `out` may hold a part by then.
    ///
    /// # Panics
    /// If there is no such tensor, the box lies outside it, or `out` has another length than the box.
    pub fn read_box(&self, key: &TensorKey, region: &Region, out: &mut [u8]) -> Result<(), ForeignError> {
        let tensor = &self.tensors[key];
        assert!(Region::whole(&tensor.shape).contains(region), "`{key}` has no {region}");
        let (width, shape) = (tensor.dtype.size_bytes(), region.shape());
        assert_eq!(out.len() as u64, region.numel() * width as u64, "`{key}`: bytes of {region}");
        for chunk in &tensor.chunks {
            let Some(overlap) = chunk.region.intersect(region) else { continue };
            let (path, view) = self.locate(key, tensor, chunk)?;
            let origin = chunk.region.lo();
            let mut take = |piece: &Region, bytes: &[u8]| {
                let within = piece.shifted_by(origin).relative_to(region);
                let part = within.shape();
                let from = BoxIn { shape: &part, region: &Region::whole(&part) };
                copy_box(bytes, from, out, BoxIn { shape: &shape, region: &within }, width);
            };
            self.read_view(&path, &view, overlap.relative_to(&chunk.region), &mut take)
                .map_err(|source| of(key.as_str(), source))?;
        }
        Ok(())
    }

    /// Where a chunk's elements lie.
    fn locate(
        &self,
        key: &TensorKey,
        tensor: &ForeignTensor,
        chunk: &Chunk,
    ) -> Result<(Arc<str>, View), ForeignError> {
        let item = match &chunk.place {
            Place::View { path, view } => return Ok((path.clone(), view.clone())),
            Place::Item(item) => item,
        };
        let locate = || {
            let file = TorchFile::open(&self.store, &item.path, item.bytes.clone())?;
            let fault = |fault| ForeignError::File { object: self.store.full_name(&item.path), fault };
            let view = file.view(file.pickle.root())?;
            let view = view.ok_or_else(|| {
                fault(format!(
                    "there is {} where a tensor should be",
                    file.pickle.describe(file.pickle.root())
                ))
            })?;
            let expected = (tensor.dtype, chunk.region.shape());
            if (view.dtype, &view.shape) != (expected.0, &expected.1) {
                return Err(fault(format!(
                    "there is a tensor of {} {} where one of {} {} should be",
                    view.dtype, view.shape, expected.0, expected.1
                )));
            }
            Ok(view)
        };
        locate().map(|view| (item.path.clone(), view)).map_err(|source| of(key.as_str(), source))
    }

    /// Hands the elements of a box of `view` to `take`, in boxes, each row-major.
    fn read_view(
        &self,
        path: &Arc<str>,
        view: &View,
        wanted: Region,
        take: &mut dyn FnMut(&Region, &[u8]),
    ) -> Result<(), ForeignError> {
        let width = view.dtype.size_bytes() as u64;
        let mut gathered = Vec::new();
        if view.storage.end - view.storage.start <= READ_BYTES {
            let bytes = self.storage(path, view)?;
            gather(view, &wanted, &bytes, 0, &mut gathered);
            take(&wanted, &gathered);
            return Ok(());
        }
        let mut boxes = vec![wanted];
        while let Some(region) = boxes.pop() {
            let hull = hull(view, &region);
            if let Some(dim) = widest(view, &region)
                && ((hull.end - hull.start) * width > READ_BYTES || has_wide_gap(view, &region, dim))
            {
                let middle = region.lo()[dim] + region.extent(dim) / 2;
                let (mut hi, mut lo) = (region.hi().to_vec(), region.lo().to_vec());
                (hi[dim], lo[dim]) = (middle, middle);
                boxes.extend([Region::new(&lo, region.hi()), Region::new(region.lo(), &hi)]);
                continue;
            }
            let at = view.storage.start;
            let bytes = read_range(&self.store, path, at + hull.start * width..at + hull.end * width)?;
            gather(view, &region, &bytes, hull.start, &mut gathered);
            take(&region, &gathered);
        }
        Ok(())
    }

    /// A storage, whole and checked.
    fn storage(&self, path: &Arc<str>, view: &View) -> Result<Bytes, ForeignError> {
        let mut last = self.last.lock().expect("nothing panics while it is held");
        if let Some((of, range, bytes)) = &*last
            && (of, range) == (path, &view.storage)
        {
            return Ok(bytes.clone());
        }
        let bytes = read_range(&self.store, path, view.storage.clone())?;
        let found = crc32(&bytes);
        if let Some(expected) = view.crc32.filter(|expected| *expected != found) {
            return Err(self.damaged(path, &view.storage, expected, found));
        }
        *last = Some((path.clone(), view.storage.clone(), bytes.clone()));
        Ok(bytes)
    }
}

const TRACKER: &str = "latest_checkpointed_iteration.txt";

fn of(key: &str, source: ForeignError) -> ForeignError {
    ForeignError::Of { key: key.to_owned(), source: Box::new(source) }
}

/// From the first to the last element of a box, in elements of the storage.
fn hull(view: &View, region: &Region) -> Range<u64> {
    let flat = |corner: &mut dyn Iterator<Item = u64>| {
        view.first + corner.zip(&view.strides).map(|(at, stride)| at * stride).sum::<u64>()
    };
    flat(&mut region.lo().iter().copied())..flat(&mut region.hi().iter().map(|hi| hi - 1)) + 1
}

/// The dim along which a box reaches furthest in the storage; none if it holds one element.
fn widest(view: &View, region: &Region) -> Option<usize> {
    let reach = |dim: &usize| (region.extent(*dim) - 1) * view.strides[*dim];
    (0..region.num_dims()).max_by_key(reach).filter(|dim| reach(dim) > 0)
}

/// Whether neighbours along `dim` are so far apart that each is rather asked for alone.
fn has_wide_gap(view: &View, region: &Region, dim: usize) -> bool {
    let (lo, mut hi) = (region.lo().to_vec(), region.hi().to_vec());
    hi[dim] = lo[dim] + 1;
    let one = hull(view, &Region::new(&lo, &hi));
    let gap = view.strides[dim].saturating_sub(one.end - one.start);
    gap * view.dtype.size_bytes() as u64 > GAP_BYTES_MAX
}

/// Row-major bytes of a box, out of bytes that begin with element `from` of the storage.
fn gather(view: &View, region: &Region, bytes: &[u8], from: u64, out: &mut Vec<u8>) {
    let width = view.dtype.size_bytes();
    out.clear();
    let (inner, stride) = match view.strides.last() {
        Some(stride) => (region.extent(region.num_dims() - 1), *stride),
        None => (1, 1),
    };
    let mut at = region.lo().to_vec();
    loop {
        let first =
            view.first + at.iter().zip(&view.strides).map(|(at, stride)| at * stride).sum::<u64>() - from;
        let start = first as usize * width;
        if stride == 1 {
            out.extend_from_slice(&bytes[start..start + inner as usize * width]);
        } else {
            for element in 0..inner as usize {
                let start = start + element * stride as usize * width;
                out.extend_from_slice(&bytes[start..start + width]);
            }
        }
        // The next row, as an odometer counts.
        let mut dim = at.len().saturating_sub(1);
        loop {
            let Some(outer) = dim.checked_sub(1) else { return };
            at[outer] += 1;
            if at[outer] < region.hi()[outer] {
                break;
            }
            at[outer] = region.lo()[outer];
            dim = outer;
        }
    }
}

fn of_safetensors(store: Store, folder: &SafetensorsFolder) -> Result<ForeignCheckpoint, ForeignError> {
    let tensors = folder.tensors().iter().map(|(name, tensor)| {
        let mut strides = vec![1u64; tensor.shape.dims().len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim].saturating_mul(tensor.shape.dims()[dim]);
        }
        let view = View {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            storage: tensor.bytes.clone(),
            crc32: None,
            first: 0,
            strides,
        };
        (name.clone(), of_view(tensor.file.as_str().into(), view))
    });
    let tensors = tensors.collect();
    ForeignCheckpoint::new(store, ForeignFormat::Safetensors, tensors, Vec::new())
}

/// A tensor that is one view.
fn of_view(path: Arc<str>, view: View) -> ForeignTensor {
    let (dtype, shape) = (view.dtype, view.shape.clone());
    let chunk = Chunk { region: Region::whole(&shape), place: Place::View { path, view } };
    ForeignTensor { dtype, shape, chunks: vec![chunk] }
}

fn open_file(store: Store, name: &str) -> Result<ForeignCheckpoint, ForeignError> {
    if name.ends_with(".safetensors") {
        let opened = SafetensorsFolder::open_file(&store, name)?;
        return of_safetensors(store, &opened);
    }
    let bytes = file_bytes(&store, name)?;
    let head = read_range(&store, name, 0..bytes.min(2))?;
    let file = match &head[..] {
        b"PK" => TorchFile::open(&store, name, 0..bytes)?,
        [0x80, _] => TorchFile::open_stream(&store, name, bytes)?,
        _ => return Err(ForeignError::Unknown { object: store.full_name(name) }),
    };
    let path: Arc<str> = name.into();
    let tensors = tensors_of(&file, &store.full_name(name))?;
    let tensors = tensors.into_iter().map(|(key, view)| (key, of_view(path.clone(), view))).collect();
    ForeignCheckpoint::new(store, ForeignFormat::TorchSave, tensors, Vec::new())
}

/// The tensors in the maps and lists of a file, by the way to them, joined by dots.
fn tensors_of(file: &TorchFile, object: &str) -> Result<Vec<(String, View)>, ForeignError> {
    let pickle = &file.pickle;
    let fault = |key: &str, fault: String| ForeignError::Entry {
        key: key.to_owned(),
        object: object.to_owned(),
        fault,
    };
    let mut tensors = Vec::new();
    let mut open: Vec<(String, Id, usize)> = vec![(String::new(), pickle.root(), 0)];
    let mut visits = 0;
    while let Some((key, id, depth)) = open.pop() {
        visits += 1;
        if depth > DEPTH_MAX || visits > VISITS_MAX {
            return Err(fault(&key, "maps and lists in it have no end".to_owned()));
        }
        let below = |name: String| if depth == 0 { name } else { format!("{key}.{name}") };
        if let Some(view) = file.view(id)? {
            tensors.push((key, view));
        } else if let Some(pairs) = pickle.pairs(id) {
            for (name, value) in pairs {
                let name = match pickle.value(name) {
                    Value::Text(text) => text.to_string(),
                    Value::Int(int) => int.to_string(),
                    Value::Bool(true) => "True".to_owned(),
                    Value::Bool(false) => "False".to_owned(),
                    Value::None => "None".to_owned(),
                    // What no path can name holds no tensor that could be asked for.
                    _ if !holds_storage(pickle, value, &mut visits) => continue,
                    _ => {
                        return Err(fault(
                            &key,
                            format!("{} is the name of a tensor", pickle.describe(name)),
                        ));
                    }
                };
                open.push((below(name), value, depth + 1));
            }
        } else if let Some(items) = pickle.sequence(id) {
            open.extend(items.iter().enumerate().map(|(at, item)| (below(at.to_string()), *item, depth + 1)));
        } else if depth == 0 || holds_storage(pickle, id, &mut visits) {
            let what = pickle.describe(id);
            let fault_text = format!("there is {what} where a tensor, or a map of tensors, should be");
            return Err(fault(&key, fault_text));
        }
    }
    Ok(tensors)
}

/// Whether a value holds a tensor's storage anywhere.
fn holds_storage(pickle: &Pickle, id: Id, visits: &mut usize) -> bool {
    let mut seen = BTreeSet::new();
    let mut open = vec![id];
    while let Some(id) = open.pop() {
        if matches!(pickle.value(id), Value::Persistent(_)) {
            return true;
        }
        *visits += 1;
        if seen.insert(id) {
            open.extend(pickle.children(id));
        }
    }
    false
}
