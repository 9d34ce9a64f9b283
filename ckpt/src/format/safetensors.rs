//! Safetensors: the folder of a Hugging Face model. Nothing is executed, and no size that a file claims is allocated before
//! the file is known to be that long.

use crate::store::{Store, StoreError};
use mesh::{DType, Shape};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de::Error as _};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// Name of the file that says which tensor is in which file.
const INDEX_NAME: &str = "model.safetensors.index.json";
/// Longest header, and longest index, in bytes: the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of one read.
const READ_BYTES: u64 = 16 << 20;

/// An opened folder: its tensors, whose bytes tile their files.
#[derive(Clone, Debug)]
pub struct SafetensorsFolder {
    store: Store,
    tensors: BTreeMap<String, SafeTensor>,
}

/// One stored tensor, row-major and little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafeTensor {
    /// Element type.
    pub dtype: DType,
    /// Elements per dim.
    pub shape: Shape,
    /// The file that holds it.
    pub file: String,
    /// Its bytes in that file.
    pub bytes: Range<u64>,
}

/// Why a folder holds no safetensors that can be read.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such file.
    #[error("`{folder}` holds no file of safetensors")]
    Nothing {
        /// The folder.
        folder: String,
    },
    /// A file is not what the format says.
    #[error("`{file}` is no file of safetensors: {fault}")]
    File {
        /// Which file.
        file: String,
        /// What is wrong.
        fault: SafetensorsFault,
    },
    /// The index and the files disagree.
    #[error("`{INDEX_NAME}` of `{folder}` says that `{name}` is in `{file}`, which is not so")]
    Index {
        /// The folder.
        folder: String,
        /// A tensor.
        name: String,
        /// Where it should be.
        file: String,
    },
    /// Two files hold a tensor of one name, or one that the index does not list.
    #[error("`{file}` of `{folder}` holds `{name}`, which `{INDEX_NAME}` or another file says is elsewhere")]
    Elsewhere {
        /// The folder.
        folder: String,
        /// The tensor.
        name: String,
        /// The file.
        file: String,
    },
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SafetensorsFault {
    #[error(
        "its header of {header} bytes does not fit its {file} bytes, or is above the limit of {HEADER_BYTES_MAX}"
    )]
    HeaderLength { header: u64, file: u64 },
    #[error("its {file} bytes are too short for a header, or too many for an index")]
    Length { file: u64 },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("`{name}` has the element type {dtype}, which is not known")]
    DType { name: String, dtype: String },
    #[error("`{name}` is said to be at bytes {begin} to {end}, which are not those of its shape")]
    Size { name: String, begin: u64, end: u64 },
    #[error("`{name}` begins at byte {begin} of the data, where the tensors before it end at {expected}")]
    Gap { name: String, begin: u64, expected: u64 },
    #[error("its tensors end at byte {end} of {data} bytes of data")]
    End { end: u64, data: u64 },
}

impl SafetensorsError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            SafetensorsError::Store(error) => error.code(),
            SafetensorsError::Nothing { .. } => "RM4060",
            SafetensorsError::File { .. } => "RM4061",
            SafetensorsError::Index { .. } | SafetensorsError::Elsewhere { .. } => "RM4062",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            SafetensorsError::Store(error) => error.help(),
            SafetensorsError::Nothing { .. } => {
                format!("give the folder that holds `{INDEX_NAME}`, or one `.safetensors` file")
            }
            _ => "the download or the copy may be incomplete; fetch the files again".to_owned(),
        }
    }
}

impl SafetensorsFolder {
    /// Opens the files at the root of `store`: those that the index names, or without an index all that are there.
    ///
    /// # Errors
    /// A file or an index that breaks a rule of the format. Reads headers only.
    pub fn open(store: &Store) -> Result<SafetensorsFolder, SafetensorsError> {
        let (folder, sizes) = (store.to_string(), store.list("")?);
        let index = match sizes.get(INDEX_NAME) {
            Some(bytes) => Some(read_index(store, *bytes)?),
            None => None,
        };
        let files: BTreeSet<String> = match &index {
            Some(index) => index.values().cloned().collect(),
            None => {
                let is_there = |name: &&String| name.ends_with(".safetensors") && !name.contains('/');
                sizes.keys().filter(is_there).cloned().collect()
            }
        };
        if files.is_empty() {
            return Err(SafetensorsError::Nothing { folder });
        }
        let mut tensors: BTreeMap<String, SafeTensor> = BTreeMap::new();
        for file in files {
            let Some(file_bytes) = sizes.get(&file).filter(|_| !file.contains('/')) else {
                let mut listed = index.iter().flatten();
                let name =
                    listed.find(|(_, of)| **of == file).map_or(String::new(), |(name, _)| name.clone());
                return Err(SafetensorsError::Index { folder, name, file });
            };
            for (name, tensor) in read_header(store, &file, *file_bytes)? {
                let is_listed = index.as_ref().is_none_or(|index| index.get(&name) == Some(&file));
                if !is_listed || tensors.contains_key(&name) {
                    return Err(SafetensorsError::Elsewhere { folder, name, file });
                }
                tensors.insert(name, tensor);
            }
        }
        match index.into_iter().flatten().find(|(name, _)| !tensors.contains_key(name)) {
            Some((name, file)) => Err(SafetensorsError::Index { folder, name, file }),
            None => Ok(SafetensorsFolder { store: store.clone(), tensors }),
        }
    }

    /// Opens one file at the root of `store`.
    ///
    /// # Errors
    /// A file that breaks a rule of the format, or is not there. Reads its header only.
    pub fn open_file(store: &Store, file: &str) -> Result<SafetensorsFolder, SafetensorsError> {
        let Some(file_bytes) = store.sizes("", std::iter::once(file))?[0] else {
            return Err(SafetensorsError::Nothing { folder: store.to_string() });
        };
        let tensors = read_header(store, file, file_bytes)?.into_iter().collect();
        Ok(SafetensorsFolder { store: store.clone(), tensors })
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, SafeTensor> {
        &self.tensors
    }

    /// The bytes of a whole tensor.
    ///
    /// # Errors
    /// If the file cannot be read, or is shorter than it was.
    ///
    /// # Panics
    /// If there is no tensor of this name.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, SafetensorsError> {
        let SafeTensor { file, bytes, .. } = &self.tensors[name];
        read_range(&self.store, file, bytes.clone())
    }
}

fn read_range(store: &Store, file: &str, bytes: Range<u64>) -> Result<Vec<u8>, SafetensorsError> {
    let mut out = Vec::with_capacity((bytes.end - bytes.start) as usize);
    let starts = (bytes.start..bytes.end).step_by(READ_BYTES as usize);
    let ranges = starts.map(|start| (file.to_owned(), start..bytes.end.min(start + READ_BYTES)));
    store.get_ranges(ranges, |_, part| {
        out.extend_from_slice(&part);
        Ok::<(), SafetensorsError>(())
    })?;
    Ok(out)
}

/// Tensor names and their files.
fn read_index(store: &Store, file_bytes: u64) -> Result<BTreeMap<String, String>, SafetensorsError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let fault = |fault| SafetensorsError::File { file: INDEX_NAME.to_owned(), fault };
    if file_bytes > HEADER_BYTES_MAX {
        return Err(fault(SafetensorsFault::Length { file: file_bytes }));
    }
    let text = read_range(store, INDEX_NAME, 0..file_bytes)?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| fault(error.into()))?;
    Ok(index.weight_map)
}

fn read_header(
    store: &Store,
    file: &str,
    file_bytes: u64,
) -> Result<Vec<(String, SafeTensor)>, SafetensorsError> {
    let fault = |fault| SafetensorsError::File { file: file.to_owned(), fault };
    if file_bytes < 8 {
        return Err(fault(SafetensorsFault::Length { file: file_bytes }));
    }
    let length = read_range(store, file, 0..8)?;
    let header = u64::from_le_bytes(length.try_into().expect("eight bytes were read"));
    if header > HEADER_BYTES_MAX.min(file_bytes - 8) {
        return Err(fault(SafetensorsFault::HeaderLength { header, file: file_bytes }));
    }
    let text = read_range(store, file, 8..8 + header)?;
    parse_header(&text, file, 8 + header..file_bytes).map_err(fault)
}

/// The tensors of a header; `data`: the bytes of `file` behind it.
fn parse_header(
    text: &[u8],
    file: &str,
    data: Range<u64>,
) -> Result<Vec<(String, SafeTensor)>, SafetensorsFault> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let mut entries = deserializer.deserialize_map(Entries)?;
    deserializer.end()?;
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut end = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, Entry { dtype, shape, data_offsets: [begin, next] }) in entries {
        let Some(dtype) = DType::from_name(&dtype) else {
            return Err(SafetensorsFault::DType { name, dtype });
        };
        let size = match shape.contains(&0) {
            true => Some(0),
            false => shape.iter().try_fold(dtype.size_bytes() as u64, |all, extent| all.checked_mul(*extent)),
        };
        if next.checked_sub(begin) != size || size.is_none() {
            return Err(SafetensorsFault::Size { name, begin, end: next });
        }
        if begin != end {
            return Err(SafetensorsFault::Gap { name, begin, expected: end });
        }
        if next > data.end - data.start {
            return Err(SafetensorsFault::End { end: next, data: data.end - data.start });
        }
        end = next;
        let bytes = data.start + begin..data.start + next;
        tensors.push((name, SafeTensor { dtype, shape: Shape::new(&shape), file: file.to_owned(), bytes }));
    }
    match end == data.end - data.start {
        true => Ok(tensors),
        false => Err(SafetensorsFault::End { end, data: data.end - data.start }),
    }
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Reads a header's map; a name that comes twice would hide bytes.
struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(String, Entry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = BTreeSet::new();
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("`{name}` comes twice")));
            }
            if name == "__metadata__" {
                map.next_value::<BTreeMap<String, String>>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(entries)
    }
}
