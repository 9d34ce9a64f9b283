//! PyTorch's distributed checkpoint: `.metadata`, a pickle that says which boxes of which tensors lie where in the other files;
//! and Megatron-Core's `torch_dist`, which is the same with a `metadata.json` beside it.

use super::foreign::{
    Chunk, ForeignCheckpoint, ForeignError, ForeignFormat, ForeignTensor, Item, Object, Place, file_bytes,
};
use super::pickle::{Id, PICKLE_BYTES_MAX, Pickle, Value};
use super::torch_file::{dtype_of, naturals};
use crate::store::Store;
use mesh::{Region, Shape};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

const METADATA: &str = ".metadata";
const MEGATRON: &str = "metadata.json";
/// Bytes of the longest description that is no pickle.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// Whether a file of this name lies in no other folder than one of this format.
pub(super) fn is_of_dcp(name: &str) -> bool {
    name.ends_with(".distcp") || matches!(name, ".metadata.tmp" | MEGATRON) || rank_of(name).is_some()
}

/// The rank whose own description this file is: without collectives each rank writes one.
fn rank_of(name: &str) -> Option<u64> {
    name.strip_prefix("__")?.strip_suffix(METADATA)?.parse().ok()
}

/// The folder of the step that Megatron's `tracker` names.
pub(super) fn tracked_folder(store: &Store, tracker: &str) -> Result<String, ForeignError> {
    let bytes = super::read_range(store, tracker, 0..file_bytes(store, tracker)?.min(JSON_BYTES_MAX))?;
    let text = String::from_utf8_lossy(&bytes);
    match (text.trim(), text.trim().parse::<u64>()) {
        ("release", _) => Ok("release".to_owned()),
        (_, Ok(step)) => Ok(format!("iter_{step:07}")),
        (text, Err(_)) => {
            let fault =
                format!("it says `{}`, which is no step", text.escape_debug().take(80).collect::<String>());
            Err(ForeignError::File { object: store.full_name(tracker), fault })
        }
    }
}

/// Opens the folder; `names`: what lies in it.
pub(super) fn open(store: Store, names: &BTreeSet<String>) -> Result<ForeignCheckpoint, ForeignError> {
    let format = match names.contains(MEGATRON) {
        true => {
            check_megatron(&store)?;
            ForeignFormat::TorchDist
        }
        false => ForeignFormat::Dcp,
    };
    let mut descriptions: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| rank_of(name).is_some()).collect();
    descriptions.sort_by_key(|name| rank_of(name));
    if names.contains(METADATA) {
        descriptions = vec![METADATA];
    }
    if descriptions.is_empty() {
        let fault = "it has no `.metadata`, which is written last: the save never finished".to_owned();
        return Err(ForeignError::File { object: store.to_string(), fault });
    }
    let mut files = Files { store: &store, lengths: HashMap::new() };
    let (mut tensors, mut objects) = (BTreeMap::new(), BTreeMap::new());
    for path in descriptions {
        let bytes = file_bytes(&store, path)?;
        let object = store.full_name(path);
        if bytes > PICKLE_BYTES_MAX {
            return Err(ForeignError::File { object, fault: "it is above the limit of 256 MiB".to_owned() });
        }
        let text = super::read_range(&store, path, 0..bytes)?;
        let pickle =
            Pickle::parse(&text).map_err(|source| ForeignError::Pickle { object: object.clone(), source })?;
        Description { pickle, object, root: HashMap::new() }.collect(
            &mut files,
            &mut tensors,
            &mut objects,
        )?;
    }
    let objects = objects.into_iter().map(|(name, item)| Object { name, item }).collect();
    ForeignCheckpoint::new(store.clone(), format, tensors.into_iter().collect(), objects)
}

fn check_megatron(store: &Store) -> Result<(), ForeignError> {
    #[derive(Deserialize)]
    struct Backend {
        sharded_backend: String,
        sharded_backend_version: u64,
    }
    let fault = |fault| ForeignError::File { object: store.full_name(MEGATRON), fault };
    let text = super::read_range(store, MEGATRON, 0..file_bytes(store, MEGATRON)?.min(JSON_BYTES_MAX))?;
    let backend: Backend = serde_json::from_slice(&text).map_err(|error| fault(error.to_string()))?;
    match (backend.sharded_backend.as_str(), backend.sharded_backend_version) {
        ("torch_dist", 1) => Ok(()),
        (name, version) => {
            Err(fault(format!("its backend is `{name}` version {version}; `torch_dist` version 1 is read")))
        }
    }
}

/// The files that descriptions speak of.
struct Files<'a> {
    store: &'a Store,
    lengths: HashMap<String, (Arc<str>, u64)>,
}

impl Files<'_> {
    fn item(&mut self, path: &str, offset: u64, length: u64) -> Result<Item, ForeignError> {
        if !self.lengths.contains_key(path) {
            self.lengths.insert(path.to_owned(), (path.into(), file_bytes(self.store, path)?));
        }
        let (path, file) = &self.lengths[path];
        match offset.checked_add(length).filter(|end| end <= file) {
            Some(end) => Ok(Item { path: path.clone(), bytes: offset..end }),
            None => Err(ForeignError::File {
                object: self.store.full_name(path),
                fault: format!("it has {file} bytes, and should hold {length} from {offset} on"),
            }),
        }
    }
}

/// One parsed `.metadata`.
struct Description {
    pickle: Pickle,
    /// With the store's name.
    object: String,
    root: HashMap<String, Id>,
}

type Key = (String, Option<Vec<u64>>);

impl Description {
    fn collect(
        mut self,
        files: &mut Files<'_>,
        tensors: &mut BTreeMap<String, ForeignTensor>,
        objects: &mut BTreeMap<String, Item>,
    ) -> Result<(), ForeignError> {
        let whole = |fault| ForeignError::File { object: self.object.clone(), fault };
        let root = self.pickle.root();
        let is_metadata = |name: &str| matches!(name, "Metadata" | "MCoreMetadata");
        if !self.pickle.call(root).is_some_and(|(class, _)| is_metadata(&class.name)) {
            return Err(whole(format!("it holds {}, and no `Metadata`", self.pickle.describe(root))));
        }
        let fields = self.state(root).map_err(whole)?;
        self.root = fields;
        let storage = self.storage().map_err(whole)?;
        let entries = self.field_pairs("state_dict_metadata").map_err(whole)?;
        let mut seen = BTreeSet::new();
        for (key, value) in entries {
            let key = self.pickle.text(key).ok_or_else(|| whole("a key is no text".to_owned()))?.to_owned();
            let fault =
                |fault: String| ForeignError::Entry { key: key.clone(), object: self.object.clone(), fault };
            if !seen.insert(key.clone()) {
                return Err(fault("it comes twice".to_owned()));
            }
            let of = |source| ForeignError::Of { key: key.clone(), source: Box::new(source) };
            let Some(tensor) = self.tensor(value).map_err(fault)? else {
                let (path, offset, length) = storage
                    .get(&(key.clone(), None))
                    .ok_or_else(|| fault("nothing says where it lies".to_owned()))?;
                let item = files.item(path, *offset, *length).map_err(of)?;
                objects.entry(key).or_insert(item);
                continue;
            };
            let (dtype, shape, boxes) = tensor;
            let known = tensors.entry(key.clone());
            let known =
                known.or_insert_with(|| ForeignTensor { dtype, shape: shape.clone(), chunks: Vec::new() });
            if (known.dtype, &known.shape) != (dtype, &shape) {
                return Err(fault("ranks describe it differently".to_owned()));
            }
            let num_known = known.chunks.len();
            for region in boxes {
                let index = (key.clone(), Some(region.lo().to_vec()));
                let (path, offset, length) = storage
                    .get(&index)
                    .ok_or_else(|| fault(format!("nothing says where its chunk {region} lies")))?;
                let item = files.item(path, *offset, *length).map_err(of)?;
                // What every rank holds, each one lists, where they did not speak with each other.
                if !known.chunks[..num_known].iter().any(|chunk| chunk.region == region) {
                    known.chunks.push(Chunk { region, place: Place::Item(item) });
                }
            }
        }
        Ok(())
    }

    /// An object's fields.
    fn state(&self, id: Id) -> Result<HashMap<String, Id>, String> {
        let what = || format!("{} without fields", self.pickle.describe(id));
        let (_, object) = self.pickle.call(id).ok_or_else(what)?;
        let pairs = match object.state.map(|state| self.pickle.value(state)) {
            None => return Ok(HashMap::new()),
            Some(Value::Dict(pairs)) => pairs,
            Some(_) => return Err(what()),
        };
        let field = |(name, value): &(Id, Id)| Some((self.pickle.text(*name)?.to_owned(), *value));
        Ok(pairs.iter().filter_map(field).collect())
    }

    fn field_pairs(&self, name: &str) -> Result<Vec<(Id, Id)>, String> {
        let pairs = self.root.get(name).and_then(|id| self.pickle.pairs(*id));
        pairs.ok_or_else(|| format!("its `{name}` is no map"))
    }

    fn class(&self, id: Id) -> Option<&str> {
        Some(&self.pickle.call(id)?.0.name)
    }

    fn field<T>(
        &self,
        fields: &HashMap<String, Id>,
        name: &str,
        read: impl Fn(Id) -> Option<T>,
    ) -> Result<T, String> {
        fields.get(name).and_then(|id| read(*id)).ok_or_else(|| format!("its `{name}` is none"))
    }

    fn natural(&self, id: Id) -> Option<u64> {
        u64::try_from(self.pickle.int(id)?).ok()
    }

    /// Path, offset and length of every piece, by name and first corner.
    fn storage(&self) -> Result<HashMap<Key, (String, u64, u64)>, String> {
        let mut storage = HashMap::new();
        for (index, place) in self.field_pairs("storage_data")? {
            let (index, place) = (self.state(index)?, self.state(place)?);
            let text = |id| self.pickle.text(id).map(str::to_owned);
            let key = self.field(&index, "fqn", text)?;
            let offset = match index.get("offset").map(|id| (id, self.pickle.value(*id))) {
                None | Some((_, Value::None)) => None,
                Some((id, _)) => Some(naturals(&self.pickle, *id)?),
            };
            let transforms = place.get("transform_descriptors").filter(|id| {
                !matches!(self.pickle.value(**id), Value::None) && self.pickle.sequence(**id) != Some(&[])
            });
            if let Some(transforms) = transforms {
                let names = self.pickle.sequence(*transforms).unwrap_or_default();
                let names: Vec<&str> = names.iter().filter_map(|name| self.pickle.text(*name)).collect();
                return Err(format!(
                    "`{key}` is stored behind {}, which is not undone here",
                    names.join(", ")
                ));
            }
            let at = (
                self.field(&place, "relative_path", text)?,
                self.field(&place, "offset", |id| self.natural(id))?,
                self.field(&place, "length", |id| self.natural(id))?,
            );
            if storage.insert((key.clone(), offset), at).is_some() {
                return Err(format!("it says twice where a chunk of `{key}` lies"));
            }
        }
        Ok(storage)
    }

    /// A tensor's element type, shape and boxes; none if the value is no tensor.
    fn tensor(&self, id: Id) -> Result<Option<(mesh::DType, Shape, Vec<Region>)>, String> {
        match self.class(id) {
            Some("BytesStorageMetadata") => return Ok(None),
            Some("TensorStorageMetadata") => {}
            _ => return Err(format!("it is {}", self.pickle.describe(id))),
        }
        let fields = self.state(id)?;
        let properties = self.field(&fields, "properties", |id| self.pickle.call(id))?.1.state;
        let properties = properties.and_then(|state| self.pickle.sequence(state)).unwrap_or_default();
        let dtype = properties.first().and_then(|id| self.pickle.global(*id));
        let dtype = dtype.ok_or("its properties name no element type")?;
        let dtype = dtype_of(dtype).ok_or_else(|| format!("its element type `{dtype}` is not known"))?;
        let shape = naturals(&self.pickle, self.field(&fields, "size", Some)?)?;
        let mut boxes = Vec::new();
        for chunk in self.field(&fields, "chunks", |id| self.pickle.sequence(id))? {
            let chunk = self.state(*chunk)?;
            let lo = naturals(&self.pickle, self.field(&chunk, "offsets", Some)?)?;
            let sizes = naturals(&self.pickle, self.field(&chunk, "sizes", Some)?)?;
            let hi =
                lo.iter().zip(&sizes).map(|(lo, size)| lo.checked_add(*size)).collect::<Option<Vec<u64>>>();
            match hi {
                Some(hi) if lo.len() == sizes.len() && lo.len() == shape.len() => {
                    boxes.push(Region::new(&lo, &hi))
                }
                _ => {
                    return Err(format!(
                        "a chunk at {lo:?} of {sizes:?} is none of a tensor of {} dims",
                        shape.len()
                    ));
                }
            }
        }
        Ok(Some((dtype, Shape::new(&shape), boxes)))
    }
}
