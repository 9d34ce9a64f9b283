//! The two Arrow tables of a checkpoint, in the IPC file format: `tensors`, a row a tensor, and `chunks`, a row a chunk.
//! They open in any Arrow library.

use crate::catalog::{Catalog, CatalogFault, StoredChunk, StoredObject, StoredTensor};
use crate::encode::{CHUNK_BYTES_MAX, ChunkChecksums, Codec, Frame};
use crate::fingerprint::Fingerprint;
use crate::statistics::{Spread, Statistics};
use arrow_array::builder::{
    FixedSizeBinaryBuilder, Float64Builder, ListBuilder, PrimitiveBuilder, StringBuilder, UInt8Builder,
    UInt32Builder, UInt64Builder,
};
use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Float64Type, UInt8Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::writer::FileWriter;
use arrow_ipc::{Block, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use bytes::Bytes;
use mesh::{DType, Placement, Region, Shape, StateKind, TensorKey};
use std::collections::HashMap;
use std::sync::Arc;

/// A table's file.
#[derive(Clone, Debug)]
pub struct TableFile {
    /// What it is called in messages.
    pub name: String,
    /// All of it.
    pub bytes: Bytes,
}

/// Why tables are no catalog.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TablesError {
    #[error("`{table}` cannot be read as a table")]
    Table { table: String, source: TableFault },
    #[error("the tables contradict each other or the files")]
    Catalog { source: CatalogFault },
}

/// Why one table cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TableFault {
    #[error("it is no Arrow file")]
    Arrow { source: ArrowError },
    #[error("it is no Arrow file: {why}")]
    Malformed { why: &'static str },
    #[error("its columns are not those of this table")]
    Columns,
    /// Rows count from 0, over all batches of the table.
    #[error("row {row}: {what}")]
    Row { row: usize, what: String },
}

impl From<ArrowError> for TableFault {
    fn from(source: ArrowError) -> TableFault {
        TableFault::Arrow { source }
    }
}

fn list_of(item: DataType) -> DataType {
    DataType::List(Arc::new(Field::new_list_field(item, false)))
}

fn tensors_schema() -> Schema {
    Schema::new(vec![
        Field::new("tensor", DataType::UInt32, false),
        Field::new("key", DataType::Utf8, false),
        Field::new("kind", DataType::Utf8, false),
        Field::new("dtype", DataType::Utf8, false),
        Field::new("shape", list_of(DataType::UInt64), false),
        Field::new("placement", DataType::Utf8, true),
        Field::new("fingerprint", DataType::FixedSizeBinary(16), false),
        Field::new("min", DataType::Float64, true),
        Field::new("max", DataType::Float64, true),
        Field::new("mean", DataType::Float64, true),
        Field::new("nonfinite", DataType::UInt64, true),
    ])
}

fn chunks_schema() -> Schema {
    Schema::new(vec![
        Field::new("tensor", DataType::UInt32, false),
        Field::new("lo", list_of(DataType::UInt64), false),
        Field::new("hi", list_of(DataType::UInt64), false),
        Field::new("pack", DataType::Utf8, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("stored_bytes", DataType::UInt64, false),
        Field::new("raw_bytes", DataType::UInt64, false),
        Field::new("codec", DataType::UInt8, false),
        Field::new("crc64", DataType::UInt64, false),
        Field::new("frame_bytes", list_of(DataType::UInt32), false),
        Field::new("frame_crc64", list_of(DataType::UInt64), false),
    ])
}

/// A builder of lists whose items are never null.
fn lists<T: ArrowPrimitiveType>() -> ListBuilder<PrimitiveBuilder<T>> {
    ListBuilder::new(PrimitiveBuilder::<T>::new()).with_field(Field::new_list_field(T::DATA_TYPE, false))
}

fn push_list<T: ArrowPrimitiveType>(
    lists: &mut ListBuilder<PrimitiveBuilder<T>>,
    items: impl IntoIterator<Item = T::Native>,
) {
    items.into_iter().for_each(|item| lists.values().append_value(item));
    lists.append(true);
}

/// The file of the tensor table.
pub(crate) fn encode_tensors(catalog: &Catalog) -> Vec<u8> {
    let (mut index, mut shapes) = (UInt32Builder::new(), lists::<UInt64Type>());
    let (mut keys, mut kinds, mut dtypes) =
        (StringBuilder::new(), StringBuilder::new(), StringBuilder::new());
    let (mut placements, mut fingerprints) = (StringBuilder::new(), FixedSizeBinaryBuilder::new(16));
    let [mut min, mut max, mut mean] = [(); 3].map(|()| Float64Builder::new());
    let mut nonfinite = UInt64Builder::new();
    for (at, tensor) in catalog.tensors().iter().enumerate() {
        index.append_value(tensor_number(at));
        keys.append_value(tensor.key.as_str());
        kinds.append_value(tensor.kind.name());
        dtypes.append_value(tensor.dtype.name());
        push_list(&mut shapes, tensor.shape.dims().iter().copied());
        let placement = tensor.placement.as_ref();
        placements.append_option(
            placement.map(|placement| serde_json::to_string(placement).expect("a placement is plain data")),
        );
        fingerprints.append_value(tensor.fingerprint.to_bytes()).expect("a fingerprint has 16 bytes");
        let spread = tensor.statistics.and_then(|statistics| statistics.finite);
        min.append_option(spread.map(|spread| spread.min));
        max.append_option(spread.map(|spread| spread.max));
        mean.append_option(spread.map(|spread| spread.mean));
        nonfinite.append_option(tensor.statistics.map(|statistics| statistics.nonfinite));
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(index.finish()),
        Arc::new(keys.finish()),
        Arc::new(kinds.finish()),
        Arc::new(dtypes.finish()),
        Arc::new(shapes.finish()),
        Arc::new(placements.finish()),
        Arc::new(fingerprints.finish()),
        Arc::new(min.finish()),
        Arc::new(max.finish()),
        Arc::new(mean.finish()),
        Arc::new(nonfinite.finish()),
    ];
    encode(tensors_schema(), columns)
}

/// The file of the chunk table.
pub(crate) fn encode_chunks(catalog: &Catalog) -> Vec<u8> {
    let (mut index, mut packs, mut codecs) =
        (UInt32Builder::new(), StringBuilder::new(), UInt8Builder::new());
    let (mut lo, mut hi) = (lists::<UInt64Type>(), lists::<UInt64Type>());
    let [mut offsets, mut stored, mut raw, mut crcs] = [(); 4].map(|()| UInt64Builder::new());
    let (mut frame_bytes, mut frame_crcs) = (lists::<UInt32Type>(), lists::<UInt64Type>());
    for (at, tensor) in catalog.tensors().iter().enumerate() {
        for chunk in &tensor.chunks {
            index.append_value(tensor_number(at));
            push_list(&mut lo, chunk.region.lo().iter().copied());
            push_list(&mut hi, chunk.region.hi().iter().copied());
            packs.append_value(&catalog.objects()[chunk.object].path);
            offsets.append_value(chunk.offset);
            stored.append_value(chunk.stored_bytes);
            raw.append_value(tensor.chunk_raw_bytes(chunk));
            codecs.append_value(chunk.codec.number());
            crcs.append_value(chunk.checksums.crc64);
            push_list(&mut frame_bytes, chunk.checksums.frames.iter().map(|frame| frame.bytes));
            push_list(&mut frame_crcs, chunk.checksums.frames.iter().map(|frame| frame.crc64));
        }
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(index.finish()),
        Arc::new(lo.finish()),
        Arc::new(hi.finish()),
        Arc::new(packs.finish()),
        Arc::new(offsets.finish()),
        Arc::new(stored.finish()),
        Arc::new(raw.finish()),
        Arc::new(codecs.finish()),
        Arc::new(crcs.finish()),
        Arc::new(frame_bytes.finish()),
        Arc::new(frame_crcs.finish()),
    ];
    encode(chunks_schema(), columns)
}

fn tensor_number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2³² tensors")
}

fn encode(schema: Schema, columns: Vec<ArrayRef>) -> Vec<u8> {
    let schema = Arc::new(schema);
    let batch =
        RecordBatch::try_new(Arc::clone(&schema), columns).expect("the columns are those of the schema");
    let mut writer = FileWriter::try_new(Vec::new(), &schema).expect("memory takes every write");
    writer.write(&batch).expect("memory takes every write");
    writer.into_inner().expect("memory takes every write")
}

/// The catalog that the two tables describe; `objects` are the packs that the commit lists.
///
/// # Errors
/// Anything that is not as the format says. Sizes and counts in the tables are checked before they are used.
pub fn read_tables(
    tensors: TableFile,
    chunks: impl IntoIterator<Item = TableFile>,
    objects: Vec<StoredObject>,
) -> Result<Catalog, TablesError> {
    let mut stored = Vec::new();
    read_rows(tensors, &tensors_schema(), |batch, row| {
        stored.push(read_tensor(batch, row, stored.len())?);
        Ok(())
    })?;
    let index: HashMap<&str, usize> =
        objects.iter().enumerate().map(|(at, object)| (object.path.as_str(), at)).collect();
    for table in chunks {
        read_rows(table, &chunks_schema(), |batch, row| read_chunk(batch, row, &mut stored, &index))?;
    }
    Catalog::new(stored, objects).map_err(|source| TablesError::Catalog { source })
}

/// Hands every row to `read`: its batch, and its number there.
fn read_rows(
    table: TableFile,
    columns: &Schema,
    mut read: impl FnMut(&RecordBatch, usize) -> Result<(), String>,
) -> Result<(), TablesError> {
    let fault = |source| TablesError::Table { table: table.name.clone(), source };
    let mut rows_before = 0;
    for batch in decode(table.bytes, columns).map_err(fault)? {
        for row in 0..batch.num_rows() {
            read(&batch, row).map_err(|what| fault(TableFault::Row { row: rows_before + row, what }))?;
        }
        rows_before += batch.num_rows();
    }
    Ok(())
}

fn read_tensor(batch: &RecordBatch, row: usize, number: usize) -> Result<StoredTensor, String> {
    let text = |column: usize| batch.column(column).as_string::<i32>().value(row);
    let float = |column: usize| {
        let column = batch.column(column).as_primitive::<Float64Type>();
        column.is_valid(row).then(|| column.value(row))
    };
    let found = number_at::<UInt32Type>(batch, 0, row);
    if found as usize != number {
        return Err(format!("it has number {found} where {number} should follow"));
    }
    let kind = StateKind::ALL.iter().copied().find(|kind| kind.name() == text(2));
    let placement =
        batch.column(5).is_valid(row).then(|| serde_json::from_str::<Placement>(text(5))).transpose();
    let nonfinite = batch.column(10).as_primitive::<UInt64Type>();
    let spread = float(7).zip(float(8)).zip(float(9)).map(|((min, max), mean)| Spread { min, max, mean });
    let fingerprint = batch.column(6).as_fixed_size_binary().value(row);
    Ok(StoredTensor {
        key: TensorKey::new(text(1)),
        kind: kind.ok_or_else(|| format!("no kind of state is called `{}`", text(2)))?,
        dtype: DType::from_name(text(3)).ok_or_else(|| format!("no element type is called `{}`", text(3)))?,
        shape: Shape::new(&list_at::<UInt64Type>(batch, 4, row)),
        placement: placement.map_err(|error| format!("its placement: {error}"))?,
        fingerprint: Fingerprint::from_bytes(fingerprint.try_into().expect("the column has 16 bytes a row")),
        statistics: nonfinite
            .is_valid(row)
            .then(|| Statistics { finite: spread, nonfinite: nonfinite.value(row) }),
        chunks: Vec::new(),
    })
}

fn read_chunk(
    batch: &RecordBatch,
    row: usize,
    tensors: &mut [StoredTensor],
    objects: &HashMap<&str, usize>,
) -> Result<(), String> {
    let number = number_at::<UInt32Type>(batch, 0, row);
    let Some(tensor) = tensors.get_mut(number as usize) else {
        return Err(format!("there is no tensor {number}"));
    };
    let (lo, hi) = (list_at::<UInt64Type>(batch, 1, row), list_at::<UInt64Type>(batch, 2, row));
    let dims = tensor.shape.dims();
    let lies_inside = lo.len() == dims.len()
        && hi.len() == dims.len()
        && (0..dims.len()).all(|dim| lo[dim] < hi[dim] && hi[dim] <= dims[dim]);
    if !lies_inside {
        return Err(format!("`{}` of shape {} has no box from {lo:?} to {hi:?}", tensor.key, tensor.shape));
    }
    let pack = batch.column(3).as_string::<i32>().value(row);
    let object = *objects.get(pack).ok_or_else(|| format!("the checkpoint has no file `{pack}`"))?;
    let codec = number_at::<UInt8Type>(batch, 7, row);
    let raw_bytes = number_at::<UInt64Type>(batch, 6, row);
    let region = Region::new(&lo, &hi);
    let expected = (hi.iter().zip(&lo))
        .try_fold(tensor.dtype.size_bytes() as u64, |product, (hi, lo)| product.checked_mul(hi - lo));
    if expected != Some(raw_bytes) || raw_bytes > CHUNK_BYTES_MAX {
        return Err(format!("`{}`: chunk {region} cannot have {raw_bytes} bytes", tensor.key));
    }
    let (sizes, sums) = (list_at::<UInt32Type>(batch, 9, row), list_at::<UInt64Type>(batch, 10, row));
    if sizes.len() != sums.len() {
        return Err(format!("`{}`: chunk {region} has frames without checksums", tensor.key));
    }
    tensor.chunks.push(StoredChunk {
        region,
        object,
        offset: number_at::<UInt64Type>(batch, 4, row),
        stored_bytes: number_at::<UInt64Type>(batch, 5, row),
        codec: Codec::from_number(codec).ok_or_else(|| format!("there is no codec {codec}"))?,
        checksums: ChunkChecksums {
            crc64: number_at::<UInt64Type>(batch, 8, row),
            frames: sizes.into_iter().zip(sums).map(|(bytes, crc64)| Frame { bytes, crc64 }).collect(),
        },
    });
    Ok(())
}

fn number_at<T: ArrowPrimitiveType>(batch: &RecordBatch, column: usize, row: usize) -> T::Native {
    batch.column(column).as_primitive::<T>().value(row)
}

fn list_at<T: ArrowPrimitiveType>(batch: &RecordBatch, column: usize, row: usize) -> Vec<T::Native> {
    batch.column(column).as_list::<i32>().value(row).as_primitive::<T>().values().to_vec()
}

/// The batches of an IPC file that has exactly these columns.
///
/// The library's decoder allocates and slices by what a file says, and panics where that is impossible; so all of it is
/// compared with the file's length first.
fn decode(file: Bytes, expected: &Schema) -> Result<Vec<RecordBatch>, TableFault> {
    const TRAILER: usize = 10;
    let malformed = |why| TableFault::Malformed { why };
    let trailer_at = file.len().checked_sub(TRAILER).ok_or(malformed("it is too short"))?;
    let trailer: [u8; TRAILER] = file[trailer_at..].try_into().expect("ten bytes");
    let footer_at = trailer_at.checked_sub(read_footer_length(trailer)?);
    let footer_at = footer_at.ok_or(malformed("its footer is longer than the file"))?;
    let footer =
        root_as_footer(&file[footer_at..trailer_at]).map_err(|_| malformed("its footer is damaged"))?;
    let schema = try_fb_to_schema(footer.schema().ok_or(malformed("it has no schema"))?)?;
    if schema.fields() != expected.fields() {
        return Err(TableFault::Columns);
    }
    let data = Buffer::from(file.slice(..footer_at));
    let decoder = FileDecoder::new(Arc::new(schema), footer.version());
    let mut batches = Vec::new();
    for block in footer.recordBatches().into_iter().flatten() {
        let bytes = block_bytes(&data, block).ok_or(malformed("a batch lies outside the file"))?;
        if !fits_its_block(&bytes, block, expected) {
            return Err(malformed("a column does not fit its batch"));
        }
        let batch = decoder.read_record_batch(block, &bytes)?.ok_or(malformed("a batch is missing"))?;
        let has_nulls =
            |(column, field): (&ArrayRef, &Arc<Field>)| !field.is_nullable() && column.null_count() > 0;
        if batch.columns().iter().zip(expected.fields()).any(has_nulls) {
            return Err(malformed("a value is missing"));
        }
        batches.push(batch);
    }
    Ok(batches)
}

fn block_bytes(data: &Buffer, block: &Block) -> Option<Buffer> {
    let offset = usize::try_from(block.offset()).ok()?;
    let metadata = usize::try_from(block.metaDataLength()).ok()?;
    let len = metadata.checked_add(usize::try_from(block.bodyLength()).ok()?)?;
    (offset.checked_add(len)? <= data.len()).then(|| data.slice_with_length(offset, len))
}

/// Whether all that the message of a batch claims lies in the body behind it and has the sizes that the schema asks for.
fn fits_its_block(bytes: &Buffer, block: &Block, schema: &Schema) -> bool {
    const PREFIX: usize = 8;
    let metadata = block.metaDataLength() as usize;
    let Some(message) = bytes.get(PREFIX..metadata).and_then(|message| root_as_message(message).ok()) else {
        return false;
    };
    let Some(batch) = message.header_as_record_batch() else { return false };
    let (Some(nodes), Some(buffers)) = (batch.nodes(), batch.buffers()) else { return false };
    let body = block.bodyLength();
    // The narrowest column takes a byte a row.
    let countable = |count: i64| (0..=body).contains(&count);
    let mut widths = Vec::new();
    schema.fields().iter().for_each(|field| push_buffer_widths(field.data_type(), &mut widths));
    let buffer_fits = |(buffer, width): (&arrow_ipc::Buffer, &i64)| {
        countable(buffer.offset())
            && countable(buffer.length())
            && countable(buffer.offset() + buffer.length())
            && buffer.length() % width == 0
    };
    bytes.starts_with(&[0xFF; 4])
        && countable(batch.length())
        && nodes.iter().all(|node| countable(node.length()) && countable(node.null_count()))
        && buffers.len() == widths.len()
        && buffers.iter().zip(&widths).all(buffer_fits)
}

/// Bytes of one item of each buffer of a column: validity first, then offsets, then values.
fn push_buffer_widths(data_type: &DataType, widths: &mut Vec<i64>) {
    match data_type {
        DataType::List(item) => {
            widths.extend([1, 4]);
            push_buffer_widths(item.data_type(), widths);
        }
        DataType::Utf8 => widths.extend([1, 4, 1]),
        other => widths.extend([1, other.primitive_width().unwrap_or(1) as i64]),
    }
}
