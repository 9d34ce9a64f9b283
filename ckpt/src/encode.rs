//! One chunk's stored bytes: codec, frames and checksums. A pack has no header; the chunk table describes its chunks.

use crc_fast::{CrcAlgorithm, checksum};
use serde::{Deserialize, Serialize};

/// Raw bytes of one frame, the unit that a partial read checks.
pub const FRAME_BYTES: u64 = 256 << 10;

/// Raw bytes of the largest chunk.
pub const CHUNK_BYTES_MAX: u64 = 16 << 20;

/// How a chunk's bytes are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// As they are in memory: row-major, little-endian.
    #[default]
    Raw,
}

impl Codec {
    /// The number in the chunk table.
    pub const fn number(self) -> u8 {
        match self {
            Codec::Raw => 0,
        }
    }

    /// The codec with this number.
    pub const fn from_number(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::Raw),
            _ => None,
        }
    }
}

/// A part of a chunk that can be read and checked alone: 256 KiB of raw bytes, the last one fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Stored bytes.
    pub bytes: u32,
    /// CRC-64/NVME of the stored bytes.
    pub crc64: u64,
}

/// Checksums of a chunk's stored bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkChecksums {
    /// CRC-64/NVME of all of them.
    pub crc64: u64,
    /// Its frames, if it holds more than one; a smaller chunk is read whole.
    pub frames: Vec<Frame>,
}

/// CRC-64/NVME.
pub fn crc64(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The checksums of a chunk stored raw.
pub(crate) fn checksums(raw: &[u8]) -> ChunkChecksums {
    let frame = |bytes: &[u8]| Frame { bytes: bytes.len() as u32, crc64: crc64(bytes) };
    let frames = if raw.len() as u64 > FRAME_BYTES {
        raw.chunks(FRAME_BYTES as usize).map(frame).collect()
    } else {
        Vec::new()
    };
    ChunkChecksums { crc64: crc64(raw), frames }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc64_nvme() {
        assert_eq!(crc64(b"123456789"), 0xAE8B_1486_0A79_9888);
    }

    #[test]
    fn chunks_above_one_frame_list_their_frames() {
        let bytes = vec![7; 2 * FRAME_BYTES as usize + 3];
        assert_eq!(checksums(&bytes[..FRAME_BYTES as usize]).frames, []);
        let sizes: Vec<u32> = checksums(&bytes).frames.iter().map(|frame| frame.bytes).collect();
        assert_eq!(sizes, [FRAME_BYTES as u32, FRAME_BYTES as u32, 3]);
    }
}
