//! A column of a Parquet file, row by row: a few rows are decoded at a time, however many the file has.

use crate::report::Refusal;
use anyhow::Context;
use parquet::basic::Type;
use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Rows that are decoded at a time.
const ROWS: usize = 64;

/// The values of a column of strings, in the order of rows; `None` is null.
pub(super) struct Column {
    path: PathBuf,
    file: SerializedFileReader<File>,
    index: usize,
    /// Of a value that is not null.
    level: i16,
    next_group: usize,
    group: Option<ColumnReaderImpl<ByteArrayType>>,
    decoded: std::vec::IntoIter<Option<ByteArray>>,
}

impl Column {
    /// Opens the column called `name`; a dot leads into a struct.
    pub(super) fn open(path: &Path, name: &str) -> anyhow::Result<Self> {
        let file = File::open(path).with_context(|| format!("opening `{}`", path.display()))?;
        let file = SerializedFileReader::new(file).map_err(|error| unreadable(path, error))?;
        let columns = file.metadata().file_metadata().schema_descr().columns();
        let holds_text = |index: usize| {
            columns[index].physical_type() == Type::BYTE_ARRAY && columns[index].max_rep_level() == 0
        };
        let texts: Vec<usize> = (0..columns.len()).filter(|index| holds_text(*index)).collect();
        let named = |index: &usize| columns[*index].path().string();
        let Some(index) = texts.iter().copied().find(|index| named(index) == name) else {
            let texts: Vec<String> =
                texts.iter().take(8).map(|index| format!("`{}`", named(index))).collect();
            let message = format!(
                "`{}`: no column of strings `{name}`; there is {}",
                path.display(),
                if texts.is_empty() { "none".into() } else { texts.join(", ") }
            );
            return Err(Refusal::new("RM1028", message, "name the column with --json-key").into());
        };
        let level = columns[index].max_def_level();
        let decoded = Vec::new().into_iter();
        Ok(Column { path: path.to_owned(), file, index, level, next_group: 0, group: None, decoded })
    }

    /// Decodes some more rows; false if there are none.
    fn decode(&mut self) -> Result<bool, ParquetError> {
        loop {
            if let Some(group) = &mut self.group {
                let (mut levels, mut values) = (Vec::new(), Vec::new());
                let (rows, ..) = group.read_records(ROWS, Some(&mut levels), None, &mut values)?;
                if rows > 0 {
                    let mut values = values.into_iter();
                    let decoded: Vec<Option<ByteArray>> = match self.level {
                        0 => values.map(Some).collect(),
                        level => levels
                            .iter()
                            .map(|own| (*own == level).then(|| values.next()).flatten())
                            .collect(),
                    };
                    self.decoded = decoded.into_iter();
                    return Ok(true);
                }
            }
            if self.next_group == self.file.num_row_groups() {
                return Ok(false);
            }
            let column = self.file.get_row_group(self.next_group)?.get_column_reader(self.index)?;
            self.group = Some(get_typed_column_reader(column));
            self.next_group += 1;
        }
    }
}

impl Iterator for Column {
    type Item = anyhow::Result<Option<Vec<u8>>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.decoded.len() == 0 {
            match self.decode() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(unreadable(&self.path, error))),
            }
        }
        let value = self.decoded.next()?;
        Some(Ok(value.map(|bytes| bytes.data().to_vec())))
    }
}

fn unreadable(path: &Path, error: ParquetError) -> anyhow::Error {
    let message = format!("`{}`: {error}", path.display());
    Refusal::new("RM1031", message, "fetch or write it anew; Snappy, gzip and Zstandard are understood")
        .into()
}
