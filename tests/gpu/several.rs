//! Several GPUs: NCCL's collectives beside those of threads, layouts over GPUs, resumes from them and on them, and what a rank that
//! fails does to those that wait for it on their GPU.
//!
//! Where there is one GPU, what needs no more than communicators runs on two processes that share it: NCCL takes them for two
//! hosts, and their data goes through sockets.

use crate::Test;
use crate::support::{self, Layout, Trace, Tracing, trace, trace_on};
use crate::training::{config, resume_through, tokens};
use mesh::{DType, Group, GroupKind, GroupTable, Rank};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use train::backend::{Backend, Buffers, Device, Lifetime, Recorder, View};
use train::comm::nccl::Links;
use train::comm::processes::{self, Launch};
use train::comm::threads::{RankContext, RankFailure, World, WorldError, WorldOptions};
use train::comm::{Comm, CommError, Reduce};
use train::config::{Numerics, Precision, TrainConfig};
use train::rng;

/// For processes on one GPU, too.
pub(crate) const COMMUNICATORS: &[Test] = &[
    ("several::collectives_are_those_of_threads", collectives_are_those_of_threads),
    ("several::operations_overlap_in_any_order_of_waits", operations_overlap_in_any_order_of_waits),
    ("several::a_rank_that_fails_ends_those_that_wait", a_rank_that_fails_ends_those_that_wait),
    ("several::a_rank_that_is_late_is_named", a_rank_that_is_late_is_named),
    ("several::ranks_that_disagree_are_named", ranks_that_disagree_are_named),
];

pub(crate) const TRAINING: &[Test] = &[
    ("several::layouts_over_gpus_give_the_bits_of_one", layouts_over_gpus_give_the_bits_of_one),
    ("several::fast_losses_are_about_those_of_one_gpu_and_of_the_cpu", fast_losses_are_about_those_of_others),
    ("several::resumes_cross_kinds", resumes_cross_kinds),
];

/// Ranks of a test: one on each GPU, or two processes.
fn num_ranks(device: &Device) -> u32 {
    match device {
        Device::Cuda(gpus) if gpus.len() > 1 => gpus.len() as u32,
        _ => 2,
    }
}

/// The variable that tells a process of this test which rank it is.
const OWN_RANK: &str = "REMESH_GPU_TEST_RANK";

/// Whether this process is one rank of a test that another one has started.
pub(crate) fn is_rank() -> bool {
    std::env::var_os(OWN_RANK).is_some()
}

/// Runs a test on two processes that share one GPU.
pub(crate) fn run_in_processes(name: &str) {
    let program = std::env::current_exe().unwrap();
    // Two worlds in one process meet at two ports.
    let port = 20_000 + std::process::id() % 20_000;
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command.arg(name).env(OWN_RANK, rank.to_string()).env("REMESH_GPU_TEST_PORT", port.to_string());
        command.env("NCCL_HOSTID", format!("host {rank}")).env("NCCL_SOCKET_IFNAME", "lo");
        command.spawn().unwrap()
    };
    let ranks = [0, 1].map(start);
    for (rank, mut child) in ranks.into_iter().enumerate() {
        assert!(child.wait().unwrap().success(), "rank {rank}");
    }
}

/// Runs `program` on every rank; the results of those in this process.
fn run_world<R: Send>(
    num_ranks: u32,
    timeout: Duration,
    program: impl Fn(&RankContext) -> Result<R, CommError> + Sync,
) -> Result<Vec<R>, WorldError<CommError>> {
    static NUM_WORLDS: AtomicU32 = AtomicU32::new(0);
    if !is_rank() {
        return World::run(num_ranks, WorldOptions { timeout, ..WorldOptions::default() }, program);
    }
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let port = number("REMESH_GPU_TEST_PORT") + NUM_WORLDS.fetch_add(1, Ordering::Relaxed);
    let launch = Launch::from_environment(|name| {
        Some(match name {
            "RANK" => number(OWN_RANK).to_string(),
            "WORLD_SIZE" => num_ranks.to_string(),
            "MASTER_ADDR" => "127.0.0.1".to_owned(),
            "MASTER_PORT" => port.to_string(),
            _ => return None,
        })
    });
    let launch = launch.unwrap().expect("it says everything");
    processes::run(&launch, timeout, &Arc::default(), program).map(|result| vec![result])
}

/// How long ranks wait for each other where nothing is late.
const PATIENCE: Duration = Duration::from_secs(60);

/// One TP group and one DP group of all ranks.
fn table(num_ranks: u32) -> Arc<GroupTable> {
    let ranks: Vec<Rank> = (0..num_ranks).map(Rank).collect();
    let groups = || Some(vec![Group::new(ranks.clone())]);
    let table = GroupTable::empty("m", ranks.clone());
    Arc::new(table.with(GroupKind::Tp, groups()).with(GroupKind::Dp, groups()))
}

/// A rank's memory on a device, and its communicator there.
struct Side {
    be: Box<dyn Backend>,
    comm: Rc<dyn Comm>,
}

/// Source, gathered, and this rank's part of `len` elements a rank.
fn views(buffers: &mut Buffers, dtype: DType, len: usize, size: usize) -> [View; 3] {
    let mut declare = |name: &str, rows, cols| buffers.declare(name, Lifetime::Persistent, dtype, rows, cols);
    [declare("source", size, len), declare("gathered", size * size, len), declare("part", 1, len)]
}

/// Little-endian elements of many magnitudes and both signs; among F32 are a NaN and zeros of both signs.
fn contents(dtype: DType, rank: u32, len: usize) -> Vec<u8> {
    let mut values = vec![0.0; len];
    rng::init_normal(rank, "contents", 0..len as u64, 1.0, &mut values);
    let word = |i: usize| rng::philox([i as u32, rank, 0, 0], [7, 99]);
    for (i, value) in values.iter_mut().enumerate() {
        *value *= f32::exp2((word(i)[0] % 24) as f32 - 12.0);
    }
    match dtype {
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::I64 => (0..len).flat_map(|i| [word(i)[0], word(i)[1]]).flat_map(u32::to_le_bytes).collect(),
        other => panic!("{other} is not reduced"),
    }
}

fn download(be: &mut dyn Backend, view: View) -> Vec<u8> {
    let mut bytes = vec![0; view.size_bytes()];
    be.download(view, &mut bytes).unwrap();
    bytes
}

/// A gather, a reduction and a scattered reduction of the same source.
fn collectives(
    side: &mut Side,
    [source, gathered, part]: [View; 3],
    reduce: Reduce,
    bytes: &[u8],
) -> Result<[Vec<u8>; 3], CommError> {
    let Side { be, comm } = side;
    let be = be.as_mut();
    be.upload(source, bytes)?;
    let gather = comm.all_gather(be, "gather", source, gathered)?;
    let scatter = comm.reduce_scatter(be, "scatter", reduce, source, part)?;
    comm.wait(be, scatter)?;
    comm.wait(be, gather)?;
    let ticket = comm.all_reduce(be, "reduce", reduce, source)?;
    comm.wait(be, ticket)?;
    Ok([gathered, part, source].map(|view| download(be, view)))
}

/// In two ranks one addition makes a sum, so every bit is given. In more, NCCL adds floats in an order of its own: each sum is off
/// by at most the roundings of its additions.
fn collectives_are_those_of_threads(device: &Device) {
    let cases = [
        (DType::F32, Reduce::Sum),
        (DType::F32, Reduce::Tree),
        (DType::F32, Reduce::Max),
        (DType::Bf16, Reduce::Sum),
        (DType::Bf16, Reduce::Tree),
        (DType::I64, Reduce::Fixed),
    ];
    let mut num_cases = 0;
    for num_ranks in 2..=num_ranks(device) {
        let table = table(num_ranks);
        for (dtype, reduce) in cases {
            for len in [1, 3, 8, 1023, 4096, 1_000_001] {
                let result = run_world(num_ranks, PATIENCE, |context| {
                    compare_collectives(device, context, &table, (dtype, reduce), len)
                });
                result.unwrap_or_else(|error| panic!("{reduce:?} of {len} {dtype}: {error}"));
                num_cases += 1;
            }
        }
    }
    println!("  {num_cases} cases of three collectives");
}

fn compare_collectives(
    device: &Device,
    context: &RankContext,
    table: &Arc<GroupTable>,
    (dtype, reduce): (DType, Reduce),
    len: usize,
) -> Result<(), CommError> {
    let groups = table.for_rank(context.rank());
    let size = context.num_ranks() as usize;
    let links = Links::connect(context, device, &groups, &[GroupKind::Tp])?;
    let mut buffers = Buffers::default();
    let views = views(&mut buffers, dtype, len, size);
    let side = |device: &Device, comm| -> Result<Side, CommError> {
        Ok(Side {
            be: device.backend(context.rank(), Recorder::new(&buffers).plan(), &Numerics::Fast)?,
            comm,
        })
    };
    let mut gpu = side(device, links.comm(context, &groups, GroupKind::Tp))?;
    let mut cpu = side(&Device::Cpu, context.comm(&groups, GroupKind::Dp))?;
    let mut bytes = contents(dtype, context.rank().0, size * len);
    if reduce == Reduce::Max && len > 4 {
        let special = [f32::NAN, 0.0, -0.0, f32::INFINITY];
        let own = context.rank().index();
        for i in 0..4 {
            bytes[4 * i..][..4].copy_from_slice(&special[(i + own) % 4].to_le_bytes());
        }
    }
    let found = collectives(&mut gpu, views, reduce, &bytes)?;
    let expected = collectives(&mut cpu, views, reduce, &bytes)?;
    for (what, (found, expected)) in ["gather", "scatter", "reduce"].iter().zip(found.iter().zip(&expected)) {
        match (reduce, size) {
            (Reduce::Sum, 3..) if *what != "gather" => close(dtype, found, expected, size),
            (Reduce::Max, _) => close(dtype, found, expected, 0),
            _ => assert!(found == expected, "{what} has other bits"),
        }
    }
    Ok(())
}

/// Elements that differ by no more than `roundings` of the largest term that there may be; a NaN stays one.
#[track_caller]
fn close(dtype: DType, found: &[u8], expected: &[u8], roundings: usize) {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        match dtype {
            DType::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            _ => bytes.as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect(),
        }
    };
    let unit = if dtype == DType::F32 { f32::EPSILON } else { 2f32.powi(-8) };
    let largest = 5.0 * 2f32.powi(11) * roundings as f32;
    for (found, expected) in numbers(found).into_iter().zip(numbers(expected)) {
        let is_same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        let is_close = (found - expected).abs() <= unit * largest * roundings as f32;
        assert!(is_same || is_close, "{found} instead of {expected}");
    }
}

/// What GTP does: gathers and reductions of two groups are in flight at once, and the step goes on beside them.
fn operations_overlap_in_any_order_of_waits(device: &Device) {
    let num_ranks = num_ranks(device);
    let table = table(num_ranks);
    const LEN: usize = 1 << 20;
    run_world(num_ranks, PATIENCE, |context| {
        let groups = table.for_rank(context.rank());
        let links = Links::connect(context, device, &groups, &[GroupKind::Tp, GroupKind::Dp])?;
        let [tp, dp] = [GroupKind::Tp, GroupKind::Dp].map(|kind| links.comm(context, &groups, kind));
        let mut buffers = Buffers::default();
        let size = num_ranks as usize;
        let mut declare = |name: &str, len| buffers.declare(name, Lifetime::Persistent, DType::I64, 1, len);
        let [a, b, c] = ["a", "b", "c"].map(|name| declare(name, LEN));
        let gathered = declare("gathered", size * LEN);
        let mut be = device.backend(context.rank(), Recorder::new(&buffers).plan(), &Numerics::Fast)?;
        let be = be.as_mut();
        let own = i64::from(context.rank().0);
        let sum = i64::from(num_ranks * (num_ranks - 1) / 2);
        for round in 0..20 {
            for (view, value) in [(a, own), (b, own + round), (c, 1)] {
                be.upload(view, bytemuck::cast_slice(&vec![value; LEN]))?;
            }
            let reduce = tp.all_reduce(be, "reduce", Reduce::Fixed, a)?;
            let gather = dp.all_gather(be, "gather", b, gathered)?;
            // The step goes on with what no collective uses.
            be.run(train::backend::Op::AddFixed { src: c, dst: c })?;
            dp.wait(be, gather)?;
            tp.wait(be, reduce)?;
            be.run(train::backend::Op::AddFixed { src: a, dst: c })?;
            let bytes = download(be, c);
            assert!(bytes.as_chunks().0.iter().all(|x| i64::from_le_bytes(*x) == sum + 2));
            let bytes = download(be, gathered);
            let expected = (0..size as i64).flat_map(|rank| std::iter::repeat_n(rank + round, LEN));
            assert!(bytes.as_chunks().0.iter().map(|x| i64::from_le_bytes(*x)).eq(expected));
        }
        Ok(())
    })
    .unwrap();
}

/// Every axis alone over two GPUs, and two axes of which one stays inside a GPU.
const LAYOUTS: [Layout; 7] = [
    Layout { dp: 2, ..Layout::SINGLE },
    Layout { cp: 2, ..Layout::SINGLE },
    Layout { tp: 2, ..Layout::SINGLE },
    Layout { tp: 2, sp: true, ..Layout::SINGLE },
    Layout { gtp: 2, nseq: 1, ..Layout::SINGLE },
    Layout { gtp: 2, nseq: 2, ..Layout::SINGLE },
    Layout { tp: 2, sp: true, gtp: 2, nseq: 2, dp: 2, ..Layout::SINGLE },
];

fn layouts_over_gpus_give_the_bits_of_one(device: &Device) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(folder.path());
    let tracing = Tracing { steps: 3, ..Tracing::default() };
    for precision in [Precision::Fp32, Precision::Bf16] {
        let config = |layout| TrainConfig { precision, ..config(layout, 3) };
        let expected = trace_on(device, &config(Layout::SINGLE), &tokens, tracing).unwrap();
        for layout in LAYOUTS {
            let found = trace_on(device, &config(layout), &tokens, tracing).unwrap();
            assert_eq!(support::difference(&expected, &found), None, "{layout:?} in {precision:?}");
        }
        println!("  {} layouts, equal bits in {precision:?}", LAYOUTS.len());
    }
}

/// In f32 only the order of sums differs: 1e-5, as between the CPU and one GPU. In bf16 partial sums of TP are rounded once more: 4e-3,
/// as between the CPU and one GPU.
fn fast_losses_are_about_those_of_others(device: &Device) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(folder.path());
    let tracing = Tracing { steps: 20, ..Tracing::default() };
    for (precision, tolerance) in [(Precision::Fp32, 1e-5), (Precision::Bf16, 4e-3)] {
        let config = |layout| TrainConfig { precision, numerics: Numerics::Fast, ..config(layout, 20) };
        let losses = |trace: Trace| trace.outcomes.iter().map(|outcome| outcome.loss).collect::<Vec<f64>>();
        let cpu = losses(trace(&config(Layout::SINGLE), &tokens, tracing).unwrap());
        let one = losses(trace_on(device, &config(Layout::SINGLE), &tokens, tracing).unwrap());
        let mut worst = 0.0f64;
        for layout in LAYOUTS {
            let found = losses(trace_on(device, &config(layout), &tokens, tracing).unwrap());
            for (found, (cpu, one)) in found.iter().zip(cpu.iter().zip(&one)) {
                let error = (found / cpu - 1.0).abs().max((found / one - 1.0).abs());
                assert!(error <= tolerance, "{layout:?} in {precision:?}: {found}, not {cpu} and {one}");
                worst = worst.max(error);
            }
        }
        println!("  {precision:?}: at most {worst:.1e} off one GPU's and the CPU's");
    }
}

fn resumes_cross_kinds(device: &Device) {
    let single = Layout::SINGLE;
    resume_through(&[
        (device, Layout { gtp: 2, nseq: 2, ..single }),
        (&Device::Cpu, Layout { tp: 4, ..single }),
        (device, Layout { dp: 2, ..single }),
        (&Device::Cpu, single),
    ]);
}

/// One all-reduce that the host waits for.
fn reduce_once(device: &Device, context: &RankContext, links: &Links) -> Result<(), CommError> {
    let groups = table(context.num_ranks()).for_rank(context.rank());
    let comm = links.comm(context, &groups, GroupKind::Tp);
    let mut buffers = Buffers::default();
    let view = buffers.declare("view", Lifetime::Persistent, DType::F32, 1, 1 << 20);
    let mut be = device.backend(context.rank(), Recorder::new(&buffers).plan(), &Numerics::Fast)?;
    let ticket = comm.all_reduce(be.as_mut(), "reduce", Reduce::Sum, view)?;
    comm.wait(be.as_mut(), ticket)?;
    download(be.as_mut(), view);
    comm.check()
}

/// Runs `program` on two ranks that have done one collective; the first cause and how long it took.
fn failure(
    device: &Device,
    timeout: Duration,
    program: impl Fn(&RankContext, &Links) -> Result<(), CommError> + Sync,
) -> (String, Duration) {
    let start = Instant::now();
    let result = run_world(2, timeout, |context| {
        let groups = table(2).for_rank(context.rank());
        let links = Links::connect(context, device, &groups, &[GroupKind::Tp])?;
        reduce_once(device, context, &links)?;
        program(context, &links)
    });
    let (RankFailure { rank, reason }, took) = (result.unwrap_err().first, start.elapsed());
    let error = format!("rank {rank}: {reason}");
    println!("  {:.1} s: {error}", took.as_secs_f64());
    (error, took)
}

fn a_rank_that_fails_ends_those_that_wait(device: &Device) {
    let (error, took) = failure(device, Duration::from_secs(60), |context, links| {
        if context.rank() == Rank(1) {
            std::thread::sleep(Duration::from_millis(300));
            panic!("out of order");
        }
        reduce_once(device, context, links)
    });
    assert_eq!(error, "rank 1: panicked: out of order");
    assert!(took < Duration::from_secs(20), "long before the time-out: {took:?}");
}

fn a_rank_that_is_late_is_named(device: &Device) {
    let (error, _) = failure(device, Duration::from_secs(2), |context, links| {
        if context.rank() == Rank(1) {
            std::thread::sleep(Duration::from_secs(6));
        }
        reduce_once(device, context, links)
    });
    assert!(error.contains("no answer within 2s: rank 0 waits in m/tp[0] operation 1"), "{error}");
    assert!(error.contains("all_reduce `reduce` of 1048576 F32 (Sum)) for 1"), "{error}");
}

fn ranks_that_disagree_are_named(device: &Device) {
    let (error, _) = failure(device, Duration::from_secs(60), |context, links| {
        let groups = table(2).for_rank(context.rank());
        let comm = links.comm(context, &groups, GroupKind::Tp);
        let mut buffers = Buffers::default();
        let len = if context.rank() == Rank(0) { 8 } else { 9 };
        let view = buffers.declare("view", Lifetime::Persistent, DType::F32, 1, len);
        let mut be = device.backend(context.rank(), Recorder::new(&buffers).plan(), &Numerics::Fast)?;
        let ticket = comm.all_reduce(be.as_mut(), "short", Reduce::Sum, view)?;
        comm.wait(be.as_mut(), ticket)?;
        download(be.as_mut(), view);
        comm.check()
    });
    assert!(error.contains("of 8 F32") && error.contains("of 9 F32"), "{error}");
}
