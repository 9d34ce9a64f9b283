mod failures;

use super::reduce::{Payload, combine};
use super::{RankContext, World, WorldOptions};
use crate::backend::Backend;
use crate::comm::board::Board;
use crate::comm::host_memory::HostMemory;
use crate::comm::{Comm, CommError, Reduce};
use mesh::{ConfiguredCp, DType, Group, GroupKind, GroupTable, LayoutSizes, ParallelLayout, Rank, RankOrder};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A model whose groups of one kind are these.
fn table(model: &str, kinds: &[(GroupKind, &[&[u32]])]) -> Arc<GroupTable> {
    let mut ranks: Vec<u32> = kinds[0].1.concat();
    ranks.sort_unstable();
    let mut table = GroupTable::empty(model, ranks.into_iter().map(Rank).collect());
    for (kind, groups) in kinds {
        let group = |ranks: &&[u32]| Group::new(ranks.iter().copied().map(Rank).collect());
        table = table.with(*kind, Some(groups.iter().map(group).collect()));
    }
    Arc::new(table)
}

/// One TP group of all ranks.
fn one_group(num_ranks: u32) -> Arc<GroupTable> {
    let ranks: Vec<u32> = (0..num_ranks).collect();
    table("m", &[(GroupKind::Tp, &[&ranks])])
}

fn tp(context: &RankContext, table: &Arc<GroupTable>) -> Rc<dyn Comm> {
    context.comm(&table.for_rank(context.rank()), GroupKind::Tp)
}

fn barrier(comm: &dyn Comm) -> Result<(), CommError> {
    comm.gather_bytes("barrier", &[]).map(drop)
}

/// Any number, the same for the same arguments.
fn random(seed: u64, i: u64) -> u64 {
    let mut z = (seed << 32 | i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// Numbers of both signs and many magnitudes, so that the order of a sum shows in its bits.
fn random_f32(seed: u64, len: usize) -> Vec<f32> {
    let value = |z: u64| (z as i32 as f32) * f32::exp2((z >> 56) as f32 % 16.0 - 31.0);
    (0..len as u64).map(|i| value(random(seed, i))).collect()
}

/// Neighbours, pairs of pairs and so on, level by level.
fn naive_tree(mut level: Vec<Vec<f32>>) -> Vec<f32> {
    while level.len() > 1 {
        let add = |pair: &[Vec<f32>]| match pair {
            [a, b] => a.iter().zip(b).map(|(a, b)| a + b).collect(),
            odd => odd[0].clone(),
        };
        level = level.chunks(2).map(add).collect();
    }
    level.remove(0)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_collective_is_the_naive_one_for_every_size() {
    for (size, block_len) in (1..=8).flat_map(|size| [0, 1, 5, 700].map(|len| (size, len))) {
        let table = one_group(size);
        let len = block_len * size as usize;
        let all_f32: Vec<Vec<f32>> = (0..size).map(|rank| random_f32(u64::from(rank), len)).collect();
        let all_i64: Vec<Vec<i64>> = (0..u64::from(size))
            .map(|rank| (0..len as u64).map(|i| random(rank, i) as i64).collect())
            .collect();
        let tree = naive_tree(all_f32.clone());
        let column = |i: usize| all_f32.iter().map(move |values| values[i]);
        let max: Vec<f32> = (0..len).map(|i| column(i).fold(f32::NEG_INFINITY, f32::max)).collect();
        let fixed: Vec<i64> = (0..len)
            .map(|i| all_i64.iter().fold(0, |sum: i64, values| sum.wrapping_add(values[i])))
            .collect();
        World::run(size, WorldOptions::default(), |context| -> Result<(), CommError> {
            let comm = tp(context, &table);
            let own = context.rank().index();
            let block = own * block_len..(own + 1) * block_len;
            let mut memory = HostMemory::default();
            let be = &mut memory;

            let src = be.holding(DType::F32, &all_f32[own]);
            let dst = be.declare(DType::F32, len, size as usize);
            let ticket = comm.all_gather(be, "gather", src, dst)?;
            comm.wait(be, ticket)?;
            assert_eq!(be.values::<f32>(dst), all_f32.concat());
            for (reduce, expected) in [(Reduce::Tree, &tree), (Reduce::Max, &max)] {
                let buf = be.holding(DType::F32, &all_f32[own]);
                let ticket = comm.all_reduce(be, "reduce", reduce, buf)?;
                comm.wait(be, ticket)?;
                assert_eq!(bits(&be.values(buf)), bits(expected), "{reduce:?} of {size}");
                let part = be.declare(DType::F32, 1, block_len);
                let ticket = comm.reduce_scatter(be, "scatter", reduce, src, part)?;
                comm.wait(be, ticket)?;
                assert_eq!(bits(&be.values(part)), bits(&expected[block.clone()]), "{reduce:?} of {size}");
            }
            let src = be.holding(DType::I64, &all_i64[own]);
            let part = be.declare(DType::I64, 1, block_len);
            let scatter = comm.reduce_scatter(be, "scatter", Reduce::Fixed, src, part)?;
            let reduce = comm.all_reduce(be, "reduce", Reduce::Fixed, src)?;
            comm.wait(be, reduce)?;
            comm.wait(be, scatter)?;
            assert_eq!(be.values::<i64>(src), fixed);
            assert_eq!(be.values::<i64>(part), &fixed[block]);

            let words = comm.gather_bytes("words", &vec![own as u8; own])?;
            assert_eq!(words, (0..size as usize).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap_or_else(|error| panic!("size {size}: {error}"));
    }
}

#[test]
fn a_gather_carries_any_type_and_may_lie_in_its_own_destination() {
    let table = one_group(3);
    World::run(3, WorldOptions::default(), |context| -> Result<(), CommError> {
        let comm = tp(context, &table);
        let be = &mut HostMemory::default();
        let dst = be.holding(DType::I32, &[0i32; 6]);
        let src = dst.reshaped(3, 2).row_range(comm.position(), comm.position() + 1);
        let own = context.rank().0 as i32;
        be.upload(src, bytemuck::cast_slice(&[own, own + 10]))?;
        let ticket = comm.all_gather(be, "gather", src, dst)?;
        comm.wait(be, ticket)?;
        assert_eq!(be.values::<i32>(dst), [0, 10, 1, 11, 2, 12]);
        Ok(())
    })
    .unwrap();
}

fn payload(values: &[f32]) -> Payload {
    let mut payload = Payload::zeros(size_of_val(values));
    payload.bytes_mut().copy_from_slice(bytemuck::cast_slice(values));
    payload
}

#[test]
fn a_tree_is_its_aligned_sub_trees_and_then_the_tree_over_them() {
    let len = 600;
    for total in [2, 4, 8, 16] {
        let leaves: Vec<Payload> = (0..total).map(|leaf| payload(&random_f32(leaf, len))).collect();
        let whole = combine(Reduce::Tree, DType::F32, &leaves, 0..len * 4);
        let backwards: Vec<Payload> = (0..total).rev().map(|leaf| payload(&random_f32(leaf, len))).collect();
        for ranks in [1, 2, 4, 8, 16].into_iter().filter(|ranks| *ranks <= leaves.len()) {
            let sub_trees: Vec<Payload> = leaves
                .chunks(leaves.len() / ranks)
                .map(|leaves| combine(Reduce::Tree, DType::F32, leaves, 0..len * 4))
                .collect();
            assert_eq!(combine(Reduce::Tree, DType::F32, &sub_trees, 0..len * 4).bytes(), whole.bytes());
        }
        if total > 2 {
            let mut shuffled = backwards;
            shuffled.swap(0, 2);
            let other = combine(Reduce::Tree, DType::F32, &shuffled, 0..len * 4);
            assert_ne!(other.bytes(), whole.bytes(), "the data shows an order");
        }
    }
}

#[test]
fn sums_of_bf16_are_rounded_after_each_addition() {
    // 1 + 2⁻⁸ is a tie and falls to 1, twice; 2⁻⁸ + 2⁻⁸ is added whole.
    let [one, small] = [0x3F80u16, 0x3B80];
    let sum = |values: &[u16]| {
        let payload = |value: &u16| {
            let mut payload = Payload::zeros(2);
            payload.bytes_mut().copy_from_slice(&value.to_le_bytes());
            payload
        };
        let payloads: Vec<Payload> = values.iter().map(payload).collect();
        let sums = [Reduce::Tree, Reduce::Sum].map(|reduce| combine(reduce, DType::Bf16, &payloads, 0..2));
        sums.map(|sum| bytemuck::cast_slice::<u8, u16>(sum.bytes())[0])
    };
    assert_eq!(sum(&[one, small, small]), [one; 2]);
    assert_eq!(sum(&[small, small, one]), [one + 1; 2]);
}

#[test]
fn a_maximum_does_not_depend_on_the_order_and_does_not_hide_a_nan() {
    let max = |values: &[f32]| {
        let payloads: Vec<Payload> = values.iter().map(|value| payload(&[*value])).collect();
        bytemuck::cast_slice::<u8, f32>(combine(Reduce::Max, DType::F32, &payloads, 0..4).bytes())[0]
    };
    for values in [[0.0, -0.0, -1.0], [-0.0, 0.0, -1.0], [-1.0, -0.0, 0.0]] {
        assert_eq!(max(&values).to_bits(), 0.0f32.to_bits());
    }
    for values in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, f32::INFINITY, -f32::NAN]] {
        assert!(max(&values).is_nan());
    }
}

#[test]
fn an_issue_does_not_wait_and_tickets_may_be_waited_for_in_any_order() {
    let table = table("m", &[(GroupKind::Tp, &[&[0, 1]]), (GroupKind::Dp, &[&[0, 1]])]);
    let issued = AtomicBool::new(false);
    World::run(2, WorldOptions::default(), |context| -> Result<(), CommError> {
        let groups = table.for_rank(context.rank());
        let (a, b) = (context.comm(&groups, GroupKind::Tp), context.comm(&groups, GroupKind::Dp));
        let be = &mut HostMemory::default();
        let own = context.rank().0 as f32;
        let [x, y, z] = [own, own + 10.0, own + 20.0].map(|value| be.holding(DType::F32, &[value]));
        if own == 1.0 {
            // Nothing comes from this rank before the other one has issued everything.
            while !issued.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }
        let first = a.all_reduce(be, "first", Reduce::Tree, x)?;
        let second = b.all_reduce(be, "second", Reduce::Tree, y)?;
        let third = a.all_reduce(be, "third", Reduce::Max, z)?;
        issued.store(true, Ordering::Release);
        let waits = [(&a, first), (&b, second), (&a, third)];
        let waits: Vec<_> = if own == 0.0 { waits.into() } else { waits.into_iter().rev().collect() };
        for (comm, ticket) in waits {
            comm.wait(be, ticket)?;
        }
        assert_eq!([x, y, z].map(|view| be.values::<f32>(view)[0]), [1.0, 21.0, 21.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_operation_is_forgotten_when_its_last_member_has_read_it() {
    let table = one_group(4);
    let boards: Vec<Arc<dyn Board>> =
        World::run(4, WorldOptions::default(), |context| -> Result<_, CommError> {
            let comm = tp(context, &table);
            let be = &mut HostMemory::default();
            let buf = be.holding(DType::F32, &[1.0f32; 8]);
            for _ in 0..10 {
                let ticket = comm.all_reduce(be, "sum", Reduce::Tree, buf)?;
                comm.wait(be, ticket)?;
                barrier(&*comm)?;
            }
            Ok(Arc::clone(&context.seat.board))
        })
        .unwrap();
    assert_eq!(boards[0].num_operations(), 0);
}

#[test]
fn a_group_of_one_copies_and_never_meets_the_world() {
    let table = Arc::new(GroupTable::empty("m", vec![Rank(0), Rank(1)]));
    let options = WorldOptions { max_incomplete: Some(0), ..WorldOptions::default() };
    let boards = World::run(2, options, |context| -> Result<_, CommError> {
        let comm = context.comm(&table.for_rank(context.rank()), GroupKind::Tp);
        assert_eq!((comm.position(), comm.size()), (0, 1));
        let be = &mut HostMemory::default();
        let src = be.holding(DType::F32, &[1.0f32, 2.0]);
        let [gathered, scattered] = [(); 2].map(|()| be.declare(DType::F32, 2, 1));
        let gather = comm.all_gather(be, "gather", src, gathered)?;
        let scatter = comm.reduce_scatter(be, "scatter", Reduce::Tree, src, scattered)?;
        let reduce = comm.all_reduce(be, "reduce", Reduce::Max, src)?;
        for view in [src, gathered, scattered] {
            assert_eq!(be.values::<f32>(view), [1.0, 2.0]);
        }
        for ticket in [gather, scatter, reduce] {
            comm.wait(be, ticket)?;
        }
        assert_eq!(comm.gather_bytes("bytes", b"ab")?, [b"ab"]);
        Ok(Arc::clone(&context.seat.board))
    })
    .unwrap();
    assert_eq!(boards[0].num_operations(), 0);
}

/// What a random program on groups of 2, 3 and 6 leaves on each rank, as bits.
fn random_program(seed: u64, options: WorldOptions) -> Vec<Vec<u32>> {
    const LEN: usize = 12;
    let kinds: [(GroupKind, &[&[u32]]); 3] = [
        (GroupKind::Tp, &[&[0, 1], &[2, 3], &[4, 5]]),
        (GroupKind::Dp, &[&[0, 2, 4], &[1, 3, 5]]),
        (GroupKind::TpDp, &[&[0, 1, 2, 3, 4, 5]]),
    ];
    let table = table("m", &kinds);
    World::run(6, options, |context| -> Result<_, CommError> {
        let groups = table.for_rank(context.rank());
        let comms = kinds.map(|(kind, _)| context.comm(&groups, kind));
        let be = &mut HostMemory::default();
        let rank = u64::from(context.rank().0);
        let states = [0, 1].map(|i| be.holding(DType::F32, &random_f32(seed * 100 + rank * 2 + i, LEN)));
        for step in 0..10 {
            // Two operations in flight, in any two groups, waited for in an order that is this rank's own.
            let mut open = Vec::new();
            for (i, state) in states.into_iter().enumerate() {
                let choice = random(seed, 1000 + 2 * step + i as u64);
                let comm = &comms[(choice % 3) as usize];
                let size = comm.size();
                let (ticket, result) = match choice / 3 % 4 {
                    0 => (comm.all_reduce(be, "tree", Reduce::Tree, state)?, state),
                    1 => (comm.all_reduce(be, "max", Reduce::Max, state)?, state),
                    2 => {
                        let gathered = be.declare(DType::F32, size, LEN);
                        (comm.all_gather(be, "gather", state, gathered)?, gathered)
                    }
                    _ => {
                        let part = be.declare(DType::F32, 1, LEN / size);
                        (comm.reduce_scatter(be, "scatter", Reduce::Tree, state, part)?, part)
                    }
                };
                open.push((comm, ticket, state, result));
            }
            if random(seed + rank, step).is_multiple_of(2) {
                open.reverse();
            }
            for (comm, ticket, state, result) in open {
                comm.wait(be, ticket)?;
                let values = be.values::<f32>(result);
                let next: Vec<f32> =
                    (0..LEN).map(|i| values[(5 * i + 1) % values.len()] * 0.5 + i as f32 * 0.01).collect();
                be.upload(state, bytemuck::cast_slice(&next))?;
            }
        }
        Ok(states.into_iter().flat_map(|state| bits(&be.values(state))).collect())
    })
    .unwrap()
}

#[test]
fn delays_and_meetings_change_no_bit_of_any_program() {
    for seed in 0..50 {
        let undisturbed = random_program(seed, WorldOptions::default());
        let jitter = WorldOptions { jitter: Some(seed), ..WorldOptions::default() };
        assert_eq!(random_program(seed, jitter), undisturbed, "seed {seed}");
        let strict = WorldOptions { max_incomplete: Some(0), ..WorldOptions::default() };
        assert_eq!(random_program(seed, strict), undisturbed, "seed {seed}");
    }
}

#[test]
fn two_models_on_ranks_of_their_own_live_in_one_world() {
    let layout = |world_size, rank_offset, tp| {
        let cp = ConfiguredCp(1);
        let order = RankOrder::default();
        let sizes =
            LayoutSizes { world_size, rank_offset, tp, pp: 1, cp, gtp: 1, gtp_sequence_shards: 1, order };
        ParallelLayout::new(sizes).unwrap()
    };
    let encoder = Arc::new(GroupTable::new("encoder", &layout(2, 0, 2)));
    let decoder = Arc::new(GroupTable::new("decoder", &layout(4, 2, 2)));
    let bridge = table("bridge", &[(GroupKind::Mp, &[&[1, 2]])]);
    let names = World::run(6, WorldOptions::default(), |context| -> Result<_, CommError> {
        let rank = context.rank();
        let model = if rank < Rank(2) { &encoder } else { &decoder };
        let comm = context.comm(&model.for_rank(rank), GroupKind::Tp);
        let name = [rank.0 as u8];
        let mut heard = comm.gather_bytes("names", &name)?.concat();
        if bridge.ranks().contains(&rank) {
            let across = context.comm(&bridge.for_rank(rank), GroupKind::Mp);
            heard.extend(across.gather_bytes("names", &name)?.concat());
        }
        Ok((comm.id().to_string(), heard))
    })
    .unwrap();
    let expected: [(&str, &[u8]); 6] = [
        ("encoder/tp[0]", &[0, 1]),
        ("encoder/tp[0]", &[0, 1, 1, 2]),
        ("decoder/tp[0]", &[2, 3, 1, 2]),
        ("decoder/tp[0]", &[2, 3]),
        ("decoder/tp[1]", &[4, 5]),
        ("decoder/tp[1]", &[4, 5]),
    ];
    assert_eq!(names, expected.map(|(id, heard)| (id.to_owned(), heard.to_vec())));
}

#[test]
fn saves_on_a_second_thread_do_not_mix_with_the_step() {
    let table = one_group(4);
    for repetition in 0..10 {
        let options = WorldOptions { jitter: Some(repetition), ..WorldOptions::default() };
        World::run(4, options, |context| {
            let groups = table.for_rank(context.rank());
            let saving = context.fork();
            thread::scope(|scope| -> Result<(), CommError> {
                let saver = scope.spawn(|| -> Result<(), CommError> {
                    let saving = saving;
                    let comm = saving.comm_for("save", &groups, GroupKind::Tp);
                    for save in 0..50u8 {
                        assert_eq!(comm.gather_bytes("published", &[save])?, vec![vec![save]; 4]);
                    }
                    Ok(())
                });
                let comm = context.comm(&groups, GroupKind::Tp);
                let be = &mut HostMemory::default();
                for step in 0..50 {
                    let buf = be.holding(DType::I64, &[step]);
                    let ticket = comm.all_reduce(be, "sum", Reduce::Fixed, buf)?;
                    comm.wait(be, ticket)?;
                    assert_eq!(be.values::<i64>(buf), [4 * step]);
                }
                saver.join().unwrap()
            })
        })
        .unwrap();
    }
}

#[test]
fn thirty_two_ranks_meet_a_hundred_times() {
    let table = one_group(32);
    World::run(32, WorldOptions::default(), |context| -> Result<(), CommError> {
        let comm = tp(context, &table);
        for _ in 0..100 {
            assert_eq!(comm.gather_bytes("names", &context.rank().0.to_le_bytes())?.len(), 32);
        }
        Ok(())
    })
    .unwrap();
}
