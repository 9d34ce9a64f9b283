//! The bytes of a `.idx` in Megatron's indexed form, little-endian: magic `MMIDIDX\0\0`, version u64 = 1, element type u8,
//! number of sequences u64, number of document borders u64, then each sequence's length i32, its byte offset i64, and the index of
//! each document's first sequence i64, with the number of sequences behind the last. Multimodal files add a mode i8 a sequence;
//! they are refused.

use std::io::{self, Write};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 9 + 8 + 1 + 8 + 8;
/// Vocabularies below this many ids are kept in 16 bits.
const U16_VOCAB_END: usize = 65_500;

/// How a token is kept; the codes of Megatron's integer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    U8 = 1,
    I8 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    U16 = 8,
}

impl Element {
    const ALL: [Element; 6] =
        [Element::U8, Element::I8, Element::I16, Element::I32, Element::I64, Element::U16];

    /// Megatron's choice for a vocabulary.
    pub(super) fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size < U16_VOCAB_END { Element::U16 } else { Element::I32 }
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Element::U8 | Element::I8 => 1,
            Element::I16 | Element::U16 => 2,
            Element::I32 => 4,
            Element::I64 => 8,
        }
    }

    /// The id in `bytes`, which are one element.
    pub(super) fn id(self, bytes: &[u8]) -> i64 {
        match self {
            Element::U8 => i64::from(bytes[0]),
            Element::I8 => i64::from(bytes[0] as i8),
            Element::I16 => i64::from(i16::from_le_bytes([bytes[0], bytes[1]])),
            Element::U16 => i64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            Element::I32 => i64::from(i32::from_le_bytes(bytes.try_into().expect("four bytes"))),
            Element::I64 => i64::from_le_bytes(bytes.try_into().expect("eight bytes")),
        }
    }
}

/// What a `.idx` says of its `.bin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Index {
    pub(super) element: Element,
    pub(super) num_tokens: u64,
    pub(super) bin_bytes: u64,
    pub(super) num_sequences: u64,
    pub(super) num_documents: u64,
}

impl Index {
    /// Reads and checks a whole `.idx`.
    ///
    /// # Errors
    /// What is wrong with it: sequences must follow one another without a gap, and documents must hold all of them in order.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.get(..9) != Some(MAGIC) {
            return Err("it does not begin with `MMIDIDX`".into());
        }
        let Some((header, lists)) = bytes.split_at_checked(HEADER_BYTES) else {
            return Err("it ends inside its header".into());
        };
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let (version, code, sequences, borders) = (word(9), header[17], word(18), word(26));
        if version != VERSION {
            return Err(format!("version {version} where {VERSION} is supported"));
        }
        let Some(element) = Element::ALL.into_iter().find(|element| *element as u8 == code) else {
            return Err(format!("element type {code} where 1 to 5 or 8 (integers) are expected"));
        };
        let expected = u128::from(sequences) * 12 + u128::from(borders) * 8;
        let found = lists.len() as u128;
        if sequences > 0 && found == expected + u128::from(sequences) {
            return Err("a mode for each sequence: multimodal data is not supported".into());
        }
        if found != expected {
            return Err(format!(
                "{found} bytes behind the header, where {sequences} sequences and {borders} document borders are {expected}"
            ));
        }
        // All three lists lie in memory, so their lengths fit.
        let (lengths, lists) = lists.split_at(sequences as usize * 4);
        let (offsets, borders) = lists.split_at(sequences as usize * 8);
        let signed = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let mut num_tokens = 0i64;
        for (length, offset) in lengths.chunks_exact(4).zip(offsets.chunks_exact(8)) {
            let length = i64::from(i32::from_le_bytes(length.try_into().expect("four bytes")));
            let offset = signed(offset);
            if length < 0 || num_tokens.checked_mul(element.bytes() as i64) != Some(offset) {
                return Err(format!(
                    "a sequence of {length} tokens at byte {offset}, behind {num_tokens} tokens"
                ));
            }
            num_tokens = num_tokens.checked_add(length).ok_or("more than 2⁶³ tokens")?;
        }
        let borders: Vec<i64> = borders.chunks_exact(8).map(signed).collect();
        let whole = borders.first() == Some(&0) && borders.last() == Some(&(sequences as i64));
        if !whole || !borders.is_sorted() {
            return Err(format!("its documents do not hold sequences 0 to {sequences} in order"));
        }
        let num_tokens = num_tokens as u64;
        let bin_bytes = num_tokens.checked_mul(element.bytes()).ok_or("more than 2⁶⁴ bytes of tokens")?;
        let (num_sequences, num_documents) = (sequences, borders.len() as u64 - 1);
        Ok(Index { element, num_tokens, bin_bytes, num_sequences, num_documents })
    }

    /// Tokens of all sequences before one, or before the end if it is the number of sequences. `bytes` are what was parsed.
    pub(super) fn tokens_before(&self, bytes: &[u8], sequence: u64) -> u64 {
        if sequence == self.num_sequences {
            return self.num_tokens;
        }
        let at = HEADER_BYTES + (self.num_sequences * 4 + sequence * 8) as usize;
        let offset = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        offset / self.element.bytes()
    }

    /// Writes the `.idx` of documents of so many tokens, each one sequence.
    pub(super) fn write(out: &mut impl Write, element: Element, lengths: &[i32]) -> io::Result<()> {
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[element as u8])?;
        out.write_all(&(lengths.len() as u64).to_le_bytes())?;
        out.write_all(&(lengths.len() as u64 + 1).to_le_bytes())?;
        for length in lengths {
            out.write_all(&length.to_le_bytes())?;
        }
        let mut offset = 0u64;
        for length in lengths {
            out.write_all(&offset.to_le_bytes())?;
            offset += *length as u64 * element.bytes();
        }
        for border in 0..=lengths.len() as u64 {
            out.write_all(&border.to_le_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn index(element: Element, lengths: &[i32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        Index::write(&mut bytes, element, lengths).unwrap();
        bytes
    }

    #[test]
    fn what_is_written_is_read_and_has_the_known_bytes() {
        let bytes = index(Element::U16, &[3, 0, 2]);
        let expected =
            Index { element: Element::U16, num_tokens: 5, bin_bytes: 10, num_sequences: 3, num_documents: 3 };
        assert_eq!(Index::parse(&bytes), Ok(expected));
        assert_eq!([0, 1, 2, 3].map(|sequence| expected.tokens_before(&bytes, sequence)), [0, 3, 3, 5]);
        let numbers: Vec<u8> =
            [1u64.to_le_bytes().as_slice(), &[8], &3u64.to_le_bytes(), &4u64.to_le_bytes()].concat();
        let lists = [
            [3i32, 0, 2].map(i32::to_le_bytes).concat(),
            [0i64, 6, 6].map(i64::to_le_bytes).concat(),
            [0i64, 1, 2, 3].map(i64::to_le_bytes).concat(),
        ];
        assert_eq!(bytes, [MAGIC.as_slice(), &numbers, &lists.concat()].concat());
        for element in Element::ALL {
            assert_eq!(Index::parse(&index(element, &[7])).unwrap().bin_bytes, 7 * element.bytes());
        }
    }

    #[test]
    fn documents_may_have_several_sequences_or_none() {
        let mut bytes = index(Element::I32, &[3, 4]);
        // Borders 0, 1, 2 become 0, 0, 2: an empty document, and one of both sequences.
        let at = bytes.len() - 16;
        bytes[at] = 0;
        assert_eq!(Index::parse(&bytes).unwrap().num_documents, 2);
    }

    #[test]
    fn an_index_cut_anywhere_is_refused() {
        let bytes = index(Element::U16, &[3, 1]);
        for end in 0..bytes.len() {
            assert!(Index::parse(&bytes[..end]).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn contradictions_and_foreign_files_are_named() {
        let good = index(Element::U16, &[3, 1]);
        let with = |at: usize, new: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + new.len()].copy_from_slice(new);
            Index::parse(&bytes).unwrap_err()
        };
        let lists = HEADER_BYTES;
        let said = [
            with(0, b"PK"),
            with(9, &2u64.to_le_bytes()),
            with(17, &[6]),
            with(18, &u64::MAX.to_le_bytes()),
            with(26, &u64::MAX.to_le_bytes()),
            with(lists, &(-1i32).to_le_bytes()),
            with(lists, &i32::MAX.to_le_bytes()),
            with(lists + 8, &2i64.to_le_bytes()),
            with(lists + 24, &1i64.to_le_bytes()),
            with(lists + 32, &9i64.to_le_bytes()),
            with(lists + 40, &1i64.to_le_bytes()),
            Index::parse(&[good.as_slice(), &[0, 1]].concat()).unwrap_err(),
            Index::parse(&index(Element::U16, &[])[..HEADER_BYTES + 7]).unwrap_err(),
        ];
        expect![[r#"
            it does not begin with `MMIDIDX`
            version 2 where 1 is supported
            element type 6 where 1 to 5 or 8 (integers) are expected
            48 bytes behind the header, where 18446744073709551615 sequences and 3 document borders are 221360928884514619404
            48 bytes behind the header, where 2 sequences and 18446744073709551615 document borders are 147573952589676412944
            a sequence of -1 tokens at byte 0, behind 0 tokens
            a sequence of 1 tokens at byte 6, behind 2147483647 tokens
            a sequence of 3 tokens at byte 2, behind 0 tokens
            its documents do not hold sequences 0 to 2 in order
            its documents do not hold sequences 0 to 2 in order
            its documents do not hold sequences 0 to 2 in order
            a mode for each sequence: multimodal data is not supported
            7 bytes behind the header, where 0 sequences and 1 document borders are 8"#]].assert_eq(&said.join("\n"));
    }
}
