//! What goes wrong in a world, and what each rank is told.

use super::{barrier, one_group, table, tp};
use crate::backend::View;
use crate::comm::host_memory::HostMemory;
use crate::comm::threads::faults::{Fault, FaultEffect};
use crate::comm::threads::{RankContext, Reason, World, WorldError, WorldOptions};
use crate::comm::{Collective, Comm, CommError, Desync, OpSignature, Operation, Reduce, Ticket};
use expect_test::expect;
use mesh::{DType, GroupKind, GroupTable, Rank};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// The errors of a run by rank.
fn errors(result: Result<Vec<()>, WorldError<CommError>>) -> BTreeMap<Rank, CommError> {
    let WorldError { first, followers } = result.unwrap_err();
    let error = |reason| match reason {
        Reason::Error(error) | Reason::Silent(error) => error,
        other => panic!("{other:?}"),
    };
    followers.into_iter().chain([first]).map(|failure| (failure.rank, error(failure.reason))).collect()
}

/// The errors of a run in which nobody may succeed.
fn all_errors(result: Result<Vec<()>, WorldError<CommError>>, num_ranks: usize) -> Vec<CommError> {
    let errors = errors(result);
    assert_eq!(errors.len(), num_ranks, "every rank ends with an error");
    errors.into_values().collect()
}

/// Steps of a program on a TP pair grid and a DP grid: whoever stops, everybody hears of it.
fn two_axes_program(context: &RankContext, table: &Arc<GroupTable>, steps: u64) -> Result<(), CommError> {
    let groups = table.for_rank(context.rank());
    let (tp, dp) = (context.comm(&groups, GroupKind::Tp), context.comm(&groups, GroupKind::Dp));
    let be = &mut HostMemory::default();
    let buf = be.holding(DType::F32, &[1.0f32; 4]);
    for _ in 0..steps {
        let ticket = tp.all_reduce(be, "tp.sum", Reduce::Tree, buf)?;
        tp.wait(be, ticket)?;
        let ticket = dp.all_reduce(be, "dp.max", Reduce::Max, buf)?;
        dp.wait(be, ticket)?;
    }
    Ok(())
}

#[test]
fn whoever_is_killed_wherever_every_other_rank_names_it() {
    let groups: [(u32, Arc<GroupTable>); 2] = [
        (2, table("m", &[(GroupKind::Tp, &[&[0, 1]]), (GroupKind::Dp, &[&[0, 1]])])),
        (4, table("m", &[(GroupKind::Tp, &[&[0, 1], &[2, 3]]), (GroupKind::Dp, &[&[0, 2], &[1, 3]])])),
    ];
    let steps = 6;
    for (num_ranks, table) in &groups {
        let cases = (0..*num_ranks).flat_map(|rank| (0..4).map(move |sequence| (Rank(rank), sequence)));
        for ((rank, sequence), kind) in cases.flat_map(|case| [(case, GroupKind::Tp), (case, GroupKind::Dp)])
        {
            let faults = vec![Fault { rank, kind, sequence, effect: FaultEffect::Fail }];
            let options = WorldOptions { faults, ..WorldOptions::default() };
            let result = World::run(*num_ranks, options, |context| two_axes_program(context, table, steps));
            assert_eq!(result.as_ref().unwrap_err().first.rank, rank);
            for error in all_errors(result, *num_ranks as usize) {
                let CommError::PeerFailed { rank: named, why } = error else { panic!("{error}") };
                assert_eq!(named, rank);
                assert!(why.starts_with(&format!("injected at operation {sequence} of m/{kind}")), "{why}");
            }
        }
    }
}

#[test]
fn a_panic_and_an_error_end_the_job_with_their_own_words() {
    let table = one_group(3);
    let run = |program: fn(&dyn Comm) -> Result<(), String>| {
        let running = AtomicU32::new(0);
        let error = World::run(3, WorldOptions::default(), |context| {
            running.fetch_add(1, Ordering::SeqCst);
            let comm = tp(context, &table);
            let result = if context.rank() == Rank(1) {
                program(&*comm)
            } else {
                barrier(&*comm).map_err(|error| error.to_string())
            };
            running.fetch_sub(1, Ordering::SeqCst);
            result
        })
        .unwrap_err();
        (error, running.into_inner())
    };
    let (error, _) = run(|_| panic!("index 7 of {}", 7));
    expect!["rank 1 failed: panicked: index 7 of 7; it ended ranks 0, 2"].assert_eq(&error.to_string());
    let (error, running) = run(|_| Err("checksum of `a.pack`".to_owned()));
    expect!["rank 1 failed: checksum of `a.pack`; it ended ranks 0, 2"].assert_eq(&error.to_string());
    expect!["rank 1 failed: checksum of `a.pack`"].assert_eq(&error.followers[0].reason.to_string());
    assert_eq!(running, 0, "no thread is left");
    let (error, _) = run(|comm| {
        comm.abort("the disk is full");
        Ok(())
    });
    expect!["rank 1 failed: the disk is full; it ended ranks 0, 2"].assert_eq(&error.to_string());
}

#[test]
fn long_work_between_collectives_hears_of_a_failure_and_the_callers_error_is_kept() {
    #[derive(Debug, PartialEq, thiserror::Error)]
    enum LoadError {
        #[error("`iter_1/data/0.pack` has checksum 1, not 2")]
        Checksum,
        #[error(transparent)]
        Comm(#[from] CommError),
    }
    let table = one_group(8);
    let error = World::run(8, WorldOptions::default(), |context| {
        let comm = tp(context, &table);
        barrier(&*comm)?;
        if context.rank() == Rank(5) {
            return Err::<(), _>(LoadError::Checksum);
        }
        loop {
            comm.check()?;
            thread::sleep(Duration::from_millis(1));
        }
    })
    .unwrap_err();
    assert_eq!(error.first.rank, Rank(5));
    assert!(matches!(error.first.reason, Reason::Error(LoadError::Checksum)), "{:?}", error.first);
    assert_eq!(error.followers.len(), 7);
    for follower in error.followers {
        assert_eq!(
            follower.reason.to_string(),
            "rank 5 failed: `iter_1/data/0.pack` has checksum 1, not 2",
            "rank {}",
            follower.rank
        );
    }
}

#[test]
fn members_that_disagree_all_end_with_both_operations() {
    type Call = fn(&dyn Comm, &mut HostMemory, View, View) -> Result<Ticket, CommError>;
    let usual: Call = |comm, be, f32s, _| comm.all_reduce(be, "loss", Reduce::Tree, f32s);
    let others: [(&str, Call); 6] = [
        ("all_gather `loss` of 4 F32", |comm, be, f32s, _| {
            let dst = be.declare(DType::F32, 2, 4);
            comm.all_gather(be, "loss", f32s, dst)
        }),
        ("all_reduce `loss` of 3 F32 (Tree)", |comm, be, f32s, _| {
            comm.all_reduce(be, "loss", Reduce::Tree, f32s.col_range(0, 3))
        }),
        ("all_reduce `loss` of 4 I64 (Fixed)", |comm, be, _, i64s| {
            comm.all_reduce(be, "loss", Reduce::Fixed, i64s)
        }),
        ("all_reduce `norm` of 4 F32 (Tree)", |comm, be, f32s, _| {
            comm.all_reduce(be, "norm", Reduce::Tree, f32s)
        }),
        ("all_reduce `loss` of 4 F32 (Max)", |comm, be, f32s, _| {
            comm.all_reduce(be, "loss", Reduce::Max, f32s)
        }),
        ("gather_bytes `loss`", |comm, _, _, _| {
            comm.gather_bytes("loss", &[]).map(|_| unreachable!("the members disagree"))
        }),
    ];
    let kinds: [(GroupKind, &[&[u32]]); 2] =
        [(GroupKind::Tp, &[&[0, 1], &[2, 3]]), (GroupKind::Dp, &[&[0, 2], &[1, 3]])];
    let table = table("gpt", &kinds);
    for (text, other) in others {
        let result = World::run(4, WorldOptions::default(), |context| {
            let comm = tp(context, &table);
            let be = &mut HostMemory::default();
            let (f32s, i64s) = (be.holding(DType::F32, &[1.0f32; 4]), be.holding(DType::I64, &[1i64; 4]));
            barrier(&*comm)?;
            let call = match context.rank() {
                Rank(0) => usual,
                Rank(1) => other,
                // Waits for the two in another group.
                rank => return barrier(&*context.comm(&table.for_rank(rank), GroupKind::Dp)),
            };
            let ticket = call(&*comm, be, f32s, i64s)?;
            comm.wait(be, ticket)
        });
        for error in all_errors(result, 4) {
            let CommError::Desync(desync) = error else { panic!("{error}") };
            let Desync { group, sequence, rank, issued, other, other_issued } = *desync;
            assert_eq!((group.to_string().as_str(), sequence), ("gpt/tp[0]", 1));
            let mut both = [(rank, issued.to_string()), (other, other_issued.to_string())];
            both.sort();
            let expected = [(Rank(0), "all_reduce `loss` of 4 F32 (Tree)"), (Rank(1), text)];
            assert_eq!(both, expected.map(|(rank, text)| (rank, text.to_owned())));
        }
    }
}

#[test]
fn ranks_that_wait_for_each_other_get_the_whole_table_at_once() {
    let kinds: [(GroupKind, &[&[u32]]); 3] = [
        (GroupKind::Tp, &[&[0, 1], &[2]]),
        (GroupKind::Dp, &[&[0, 1], &[2]]),
        (GroupKind::Pp, &[&[1], &[2, 0]]),
    ];
    let table = table("gpt", &kinds);
    let result = World::run(3, WorldOptions::default(), |context| {
        let (kind, _) = kinds[context.rank().index()];
        barrier(&*context.comm(&table.for_rank(context.rank()), kind))
    });
    for error in all_errors(result, 3) {
        expect!["deadlock: rank 0 waits in gpt/tp[0] operation 0 (gather_bytes `barrier`) for 1; rank 1 waits in gpt/dp[0] operation 0 (gather_bytes `barrier`) for 0; rank 2 waits in gpt/pp[1] operation 0 (gather_bytes `barrier`) for 0"]
            .assert_eq(&error.to_string());
    }
}

#[test]
fn who_waits_for_a_rank_that_has_ended_is_told_even_while_others_run() {
    let table = one_group(3);
    let told = AtomicBool::new(false);
    let result = World::run(3, WorldOptions::default(), |context| {
        let comm = tp(context, &table);
        match context.rank() {
            Rank(0) => {
                let result = barrier(&*comm);
                told.store(true, Ordering::Release);
                result
            }
            Rank(1) => Ok(()),
            _ => {
                while !told.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                Ok(())
            }
        }
    });
    expect!["deadlock: rank 0 waits in m/tp[0] operation 0 (gather_bytes `barrier`) for 1, 2; ended: 1"]
        .assert_eq(&errors(result)[&Rank(0)].to_string());
}

#[test]
fn a_rank_that_computes_for_ever_is_named_when_time_is_up() {
    let table = one_group(3);
    let options = WorldOptions { timeout: Duration::from_millis(50), ..WorldOptions::default() };
    let result = World::run(3, options, |context| {
        let comm = tp(context, &table);
        while context.rank() == Rank(2) {
            comm.check()?;
            thread::sleep(Duration::from_millis(1));
        }
        barrier(&*comm)
    });
    for error in all_errors(result, 3) {
        let CommError::TimedOut { limit, blocked } = &error else { panic!("{error}") };
        assert_eq!(*limit, Duration::from_millis(50));
        assert!(!blocked.is_empty());
        assert!(blocked.iter().all(|blocked| blocked.missing.contains(&Rank(2))), "{error}");
    }
}

#[test]
fn a_corrupted_contribution_reaches_every_member() {
    let table = one_group(3);
    let fault = Fault { rank: Rank(1), kind: GroupKind::Tp, sequence: 1, effect: FaultEffect::Corrupt };
    let options = WorldOptions { faults: vec![fault], ..WorldOptions::default() };
    let seen = World::run(3, options, |context| -> Result<_, CommError> {
        let comm = tp(context, &table);
        let sum = || -> Result<i64, CommError> {
            let be = &mut HostMemory::default();
            let buf = be.holding(DType::I64, &[10i64]);
            let ticket = comm.all_reduce(be, "sum", Reduce::Fixed, buf)?;
            comm.wait(be, ticket)?;
            Ok(be.values(buf)[0])
        };
        Ok([sum()?, sum()?, sum()?])
    })
    .unwrap();
    assert_eq!(seen, [[30, 31, 30]; 3]);
}

#[test]
fn a_program_that_needs_buffering_is_found_when_operations_must_meet() {
    let table = table("m", &[(GroupKind::Tp, &[&[0, 1]]), (GroupKind::Dp, &[&[0, 1]])]);
    let run = |max_incomplete, crossed: bool| {
        let options = WorldOptions { max_incomplete, ..WorldOptions::default() };
        World::run(2, options, |context| {
            let groups = table.for_rank(context.rank());
            let be = &mut HostMemory::default();
            let mut kinds = [GroupKind::Tp, GroupKind::Dp];
            if crossed && context.rank() == Rank(1) {
                kinds.reverse();
            }
            let mut tickets = Vec::new();
            for kind in kinds {
                let comm = context.comm(&groups, kind);
                let buf = be.holding(DType::F32, &[1.0f32]);
                tickets.push((comm.all_reduce(be, "sum", Reduce::Tree, buf)?, comm));
            }
            tickets.into_iter().try_for_each(|(ticket, comm)| comm.wait(be, ticket))
        })
    };
    run(None, true).unwrap();
    run(Some(1), true).unwrap();
    run(Some(0), false).unwrap();
    assert!(matches!(all_errors(run(Some(0), true), 2)[0], CommError::Deadlock { .. }));
}

#[test]
fn a_stuck_save_is_named_by_its_purpose() {
    let table = one_group(2);
    let result = World::run(2, WorldOptions::default(), |context| -> Result<(), CommError> {
        let groups = table.for_rank(context.rank());
        if context.rank() == Rank(0) {
            let saving = context.fork();
            let groups = groups.clone();
            let save = thread::spawn(move || barrier(&*saving.comm_for("save", &groups, GroupKind::Tp)));
            return save.join().unwrap();
        }
        Ok(())
    });
    expect!["deadlock: rank 0 waits in m/tp[0]:save operation 0 (gather_bytes `barrier`) for 1; ended: 1"]
        .assert_eq(&errors(result)[&Rank(0)].to_string());
}

#[test]
fn a_forked_thread_that_panics_ends_the_job() {
    let table = one_group(2);
    let error = World::run(2, WorldOptions::default(), |context| -> Result<(), CommError> {
        let comm = tp(context, &table);
        if context.rank() == Rank(1) {
            let saving = context.fork();
            let save = thread::spawn(move || {
                let _saving = saving;
                panic!("no space left");
            });
            assert!(save.join().is_err());
        }
        loop {
            barrier(&*comm)?;
        }
    })
    .unwrap_err();
    assert_eq!(error.first.rank, Rank(1));
    expect!["rank 1 failed: a thread of this rank panicked"]
        .assert_eq(&error.followers[0].reason.to_string());
}

#[test]
#[should_panic(expected = "`x` combines F32 by Fixed")]
fn a_reduction_of_the_wrong_type_is_wrong_code() {
    let be = &mut HostMemory::default();
    let buf = be.declare(DType::F32, 1, 1);
    Operation::new(Collective::AllReduce(Reduce::Fixed), "x", buf, buf, 2);
}

/// A gather of `len` elements that is done elsewhere, such as between GPUs.
fn elsewhere(len: usize) -> OpSignature {
    OpSignature::Tensor { collective: Collective::AllGather, site: "elsewhere", dtype: DType::F32, len }
}

#[test]
fn what_members_announce_is_numbered_and_forgotten_when_all_have() {
    let table = one_group(2);
    let boards = World::run(2, WorldOptions::default(), |context| -> Result<_, CommError> {
        let comm = context.board_comm("", &table.for_rank(context.rank()), GroupKind::Tp);
        for number in 0..3 {
            assert_eq!(comm.announce(elsewhere(8))?, number);
        }
        barrier(&comm)?;
        Ok(Arc::clone(&context.seat.board))
    });
    assert_eq!(boards.unwrap()[0].num_operations(), 0);
}

#[test]
fn members_that_announce_different_operations_are_named() {
    let table = one_group(2);
    let result = World::run(2, WorldOptions::default(), |context| {
        let comm = context.board_comm("", &table.for_rank(context.rank()), GroupKind::Tp);
        comm.announce(elsewhere(8 + context.rank().index()))?;
        barrier(&comm)
    });
    for error in all_errors(result, 2) {
        let CommError::Desync(desync) = error else { panic!("{error}") };
        assert_ne!(desync.issued, desync.other_issued);
    }
}

/// Waits, as for a GPU, until the job has failed.
fn wait_for_the_end(comm: &dyn Comm) -> Result<(), CommError> {
    for _ in 0..1000 {
        comm.check()?;
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn whoever_ends_without_what_another_has_announced_ends_the_job() {
    let table = one_group(2);
    let result = World::run(2, WorldOptions::default(), |context| {
        let comm = context.board_comm("", &table.for_rank(context.rank()), GroupKind::Tp);
        if context.rank() == Rank(1) {
            return Ok(());
        }
        comm.announce(elsewhere(8))?;
        wait_for_the_end(&comm)
    });
    let errors = errors(result);
    let CommError::Deadlock { blocked, ended } = &errors[&Rank(0)] else { panic!("{errors:?}") };
    assert_eq!((blocked[0].rank, &blocked[0].missing), (Rank(0), &vec![Rank(1)]));
    assert_eq!(*ended, [Rank(1)]);
}

#[test]
fn an_announcement_that_is_too_late_is_found_by_whoever_looks() {
    let table = one_group(2);
    let options = WorldOptions { timeout: Duration::from_millis(50), ..WorldOptions::default() };
    let result = World::run(2, options, |context| {
        let comm = context.board_comm("", &table.for_rank(context.rank()), GroupKind::Tp);
        if context.rank() == Rank(0) {
            comm.announce(elsewhere(8))?;
            thread::sleep(Duration::from_millis(100));
            context.job().expire();
        }
        wait_for_the_end(&comm)
    });
    for error in all_errors(result, 2) {
        let CommError::TimedOut { blocked, .. } = error else { panic!("{error}") };
        assert_eq!((blocked[0].rank, &blocked[0].missing), (Rank(0), &vec![Rank(1)]));
    }
}
