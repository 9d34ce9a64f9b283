//! Memory is planned, not allocated: buffers are declared once, a dry run of the program on the [`Recorder`] shows when each
//! of them lives, and transient ones that never live at the same time share their place.

use super::{Backend, BackendError, BufId, Op, View};
use mesh::DType;
use std::collections::BTreeMap;

/// How long a buffer's content counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Over the whole run: weights, moments, gradient accumulators. Starts as zeros.
    Persistent,
    /// From its first write to its last use inside one recorded program.
    Transient,
}

#[derive(Clone, Debug)]
struct Declared {
    name: String,
    dtype: DType,
    len: usize,
    lifetime: Lifetime,
}

/// The buffers of a program, declared before it first runs.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    declared: Vec<Declared>,
}

impl Buffers {
    /// Declares a buffer of `rows × cols` elements.
    pub fn declare(
        &mut self,
        name: impl Into<String>,
        lifetime: Lifetime,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> View {
        let id = BufId(self.declared.len() as u32);
        self.declared.push(Declared { name: name.into(), dtype, len: rows * cols, lifetime });
        View::whole(id, dtype, rows, cols)
    }
}

/// A backend that computes nothing and notes when each buffer is used.
#[derive(Debug)]
pub struct Recorder {
    buffers: Vec<Declared>,
    /// First and last operation that touches each buffer.
    uses: Vec<Option<(usize, usize)>>,
    now: usize,
}

impl Recorder {
    /// A recorder of a program on these buffers.
    pub fn new(buffers: &Buffers) -> Self {
        Recorder { buffers: buffers.declared.clone(), uses: vec![None; buffers.declared.len()], now: 0 }
    }

    /// Notes that the next operation touches `views`.
    fn touch(&mut self, views: impl IntoIterator<Item = View>) {
        self.now += 1;
        for view in views {
            let declared = &self.buffers[view.buf.0 as usize];
            assert_eq!(view.dtype, declared.dtype, "`{}` is viewed as another type", declared.name);
            assert!(view.extent().1 <= declared.len, "a view reaches past the end of `{}`", declared.name);
            let (first, _) = self.uses[view.buf.0 as usize].unwrap_or((self.now, self.now));
            self.uses[view.buf.0 as usize] = Some((first, self.now));
        }
    }

    /// The plan for the program that was recorded.
    ///
    /// # Panics
    /// If a transient buffer was never used: it should not have been declared.
    pub fn plan(self) -> MemoryPlan {
        MemoryPlan::new(self.buffers, &self.uses)
    }
}

impl Backend for Recorder {
    fn run(&mut self, op: Op) -> Result<(), BackendError> {
        op.check();
        let (reads, writes) = op.operands();
        self.touch(reads.into_iter().chain(writes));
        Ok(())
    }

    fn upload(&mut self, dst: View, _: &[u8]) -> Result<(), BackendError> {
        self.touch([dst]);
        Ok(())
    }

    fn download(&mut self, src: View, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.touch([src]);
        bytes.fill(0);
        Ok(())
    }

    fn take_fixed_point_peak(&mut self) -> Result<f32, BackendError> {
        Ok(0.0)
    }
}

/// Where each buffer lies in the arena of its element type.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    slots: Vec<Slot>,
    arena_len: BTreeMap<DType, usize>,
}

/// A buffer's place.
#[derive(Clone, Debug)]
pub struct Slot {
    /// What the program calls it.
    pub name: String,
    /// Element type, which names the arena.
    pub dtype: DType,
    /// First element in the arena.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
    /// Whether its content counts from the start.
    pub persistent: bool,
    /// Buffers that lie, in part, in the same place: writing this one destroys them.
    pub shares_with: Vec<BufId>,
}

impl MemoryPlan {
    /// Elements at whose multiples buffers start: 128 bytes at least, so that devices can read many at once.
    const ALIGNMENT: usize = 64;

    fn new(buffers: Vec<Declared>, uses: &[Option<(usize, usize)>]) -> Self {
        let mut arena_len = BTreeMap::new();
        let mut slots: Vec<Slot> = Vec::with_capacity(buffers.len());
        for declared in &buffers {
            let mut start = 0;
            if declared.lifetime == Lifetime::Persistent {
                let end = arena_len.entry(declared.dtype).or_insert(0);
                start = *end;
                *end = (start + declared.len).next_multiple_of(Self::ALIGNMENT);
            }
            slots.push(Slot {
                name: declared.name.clone(),
                dtype: declared.dtype,
                start,
                len: declared.len,
                persistent: declared.lifetime == Lifetime::Persistent,
                shares_with: Vec::new(),
            });
        }
        let persistent_end = arena_len.clone();
        let alive = |index: usize| {
            uses[index].unwrap_or_else(|| panic!("buffer `{}` is never used", buffers[index].name))
        };
        // Where a rank holds nothing, nothing is done with it.
        let takes_memory = |index: &usize| !slots[*index].persistent && slots[*index].len > 0;
        let mut order: Vec<usize> = (0..slots.len()).filter(takes_memory).collect();
        order.sort_by_key(|index| std::cmp::Reverse(slots[*index].len));
        let mut placed: Vec<usize> = Vec::new();
        for index in order {
            let (first, last) = alive(index);
            // Places of the buffers that live while this one does, in ascending order: take the first gap that fits.
            let mut taken: Vec<(usize, usize)> = placed
                .iter()
                .filter(|other| slots[**other].dtype == slots[index].dtype)
                .filter(|other| alive(**other).0 <= last && first <= alive(**other).1)
                .map(|other| (slots[*other].start, slots[*other].start + slots[*other].len))
                .collect();
            taken.sort_unstable();
            let mut start = persistent_end.get(&slots[index].dtype).copied().unwrap_or(0);
            for (lo, hi) in taken {
                if lo >= start + slots[index].len {
                    break;
                }
                start = start.max(hi.next_multiple_of(Self::ALIGNMENT));
            }
            slots[index].start = start;
            let end = arena_len.entry(slots[index].dtype).or_insert(0);
            *end = (*end).max(start + slots[index].len);
            for other in &placed {
                let (a, b) = (&slots[index], &slots[*other]);
                if a.dtype == b.dtype && a.start < b.start + b.len && b.start < a.start + a.len {
                    slots[index].shares_with.push(BufId(*other as u32));
                    slots[*other].shares_with.push(BufId(index as u32));
                }
            }
            placed.push(index);
        }
        MemoryPlan { slots, arena_len }
    }

    /// The place of a buffer.
    pub fn slot(&self, buf: BufId) -> &Slot {
        &self.slots[buf.0 as usize]
    }

    /// All places, by buffer number.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Elements of the arena of `dtype`.
    pub fn arena_len(&self, dtype: DType) -> usize {
        self.arena_len.get(&dtype).copied().unwrap_or(0)
    }

    /// Bytes of all arenas.
    pub fn size_bytes(&self) -> usize {
        self.arena_len.iter().map(|(dtype, len)| len * dtype.size_bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_never_live_together_share_their_place_and_no_others_do() {
        let mut buffers = Buffers::default();
        let kept = buffers.declare("kept", Lifetime::Persistent, DType::F32, 1, 10);
        let [a, b, c] =
            ["a", "b", "c"].map(|name| buffers.declare(name, Lifetime::Transient, DType::F32, 2, 50));
        let mut recorder = Recorder::new(&buffers);
        recorder.run(Op::Zero { dst: a }).unwrap();
        recorder.run(Op::Copy { src: a, dst: b }).unwrap();
        recorder.run(Op::Copy { src: b, dst: c }).unwrap();
        recorder.run(Op::Copy { src: c.col_range(0, 5).row_range(0, 1), dst: kept.col_range(0, 5) }).unwrap();
        let plan = recorder.plan();
        assert_eq!(
            plan.arena_len(DType::F32),
            64 + 128 + 100,
            "a and c share, b does not; all start at multiples of 64"
        );
        assert_eq!(plan.slot(a.buf).start, plan.slot(c.buf).start);
        assert_eq!(plan.slot(a.buf).shares_with, [c.buf]);
        assert_eq!(plan.slot(b.buf).shares_with, []);
    }

    #[test]
    #[should_panic(expected = "`spare` is never used")]
    fn a_buffer_that_is_never_used_is_wrong_code() {
        let mut buffers = Buffers::default();
        buffers.declare("spare", Lifetime::Transient, DType::F32, 1, 1);
        Recorder::new(&buffers).plan();
    }
}
