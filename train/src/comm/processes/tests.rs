//! Ranks that meet over TCP, here threads of one process: each has nothing of the others but its connections.

use super::hub::GRACE;
use super::wire::{self, Place, Request};
use super::{Hub, Launch, LaunchError, run};
use crate::backend::Backend;
use crate::comm::host_memory::HostMemory;
use crate::comm::threads::{RankContext, Reason, World, WorldError, WorldOptions};
use crate::comm::{Comm, CommError, GroupId, Membership, OpSignature, Reduce};
use mesh::{DType, Group, GroupKind, GroupTable, Rank};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Of the jobs' names.
const WORD: &str = "word";

fn job(address: SocketAddr) -> String {
    format!("{address}/{WORD}")
}

fn table(num_ranks: u32) -> Arc<GroupTable> {
    let ranks: Vec<Rank> = (0..num_ranks).map(Rank).collect();
    let groups = Some(vec![Group::new(ranks.clone())]);
    Arc::new(GroupTable::empty("m", ranks).with(GroupKind::Tp, groups))
}

fn comm(context: &RankContext) -> Rc<dyn Comm> {
    context.comm(&table(context.num_ranks()).for_rank(context.rank()), GroupKind::Tp)
}

/// Runs `program` on ranks that meet at a hub; their results by rank.
fn run_on<R: Send>(
    num_ranks: u32,
    timeout: Duration,
    program: impl Fn(&RankContext) -> Result<R, CommError> + Sync,
) -> Vec<Result<R, WorldError<CommError>>> {
    run_after(num_ranks, timeout, |_| Duration::ZERO, program)
}

/// The same of ranks that start after a while.
fn run_after<R: Send>(
    num_ranks: u32,
    timeout: Duration,
    delay: impl Fn(u32) -> Duration + Sync,
    program: impl Fn(&RankContext) -> Result<R, CommError> + Sync,
) -> Vec<Result<R, WorldError<CommError>>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let hub = Hub::serve(listener, &job(address), num_ranks, timeout).unwrap();
    let run_rank = |rank| {
        thread::sleep(delay(rank));
        let environment = Launch::environment(rank, num_ranks, address, WORD);
        let launch = Launch::from_environment(|name| {
            environment.iter().find(|(said, _)| *said == name).map(|(_, value)| value.clone())
        });
        run(&launch.unwrap().unwrap(), timeout, &Arc::default(), &program)
    };
    let outcomes = thread::scope(|scope| {
        let ranks: Vec<_> = (0..num_ranks).map(|rank| scope.spawn(move || run_rank(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    hub.finish();
    outcomes
}

/// A few collectives of every kind, as bits.
fn program(context: &RankContext) -> Result<Vec<Vec<u8>>, CommError> {
    let (comm, size) = (comm(context), context.num_ranks() as usize);
    let be = &mut HostMemory::default();
    let own = context.rank().0 as f32;
    let values: Vec<f32> = (0..size * 1000).map(|i| (own + 1.3) * (i as f32 - 700.7)).collect();
    let src = be.holding(DType::F32, &values);
    let (gathered, part) = (be.declare(DType::F32, size, values.len()), be.declare(DType::F32, 1, 1000));
    let gather = comm.all_gather(be, "gather", src, gathered)?;
    let scatter = comm.reduce_scatter(be, "scatter", Reduce::Tree, src, part)?;
    comm.wait(be, scatter)?;
    comm.wait(be, gather)?;
    let reduce = comm.all_reduce(be, "reduce", Reduce::Max, src)?;
    comm.wait(be, reduce)?;
    let mut all = comm.gather_bytes("bytes", &vec![own as u8; own as usize])?;
    all.extend(comm.gather_bytes_at_first("first", &[own as u8])?);
    for view in [gathered, part, src] {
        let mut bytes = vec![0; view.size_bytes()];
        be.download(view, &mut bytes)?;
        all.push(bytes);
    }
    Ok(all)
}

#[test]
fn collectives_of_processes_are_those_of_threads() {
    for num_ranks in [2, 3, 5] {
        let threads = World::run(num_ranks, WorldOptions::default(), program).unwrap();
        let processes = run_on(num_ranks, TIMEOUT, program);
        let processes: Vec<_> = processes.into_iter().map(Result::unwrap).collect();
        assert!(processes == threads, "{num_ranks} ranks");
    }
}

#[test]
fn a_second_thread_of_a_rank_talks_beside_it() {
    let outcomes = run_on(3, TIMEOUT, |context| {
        let table = table(3);
        let saving = context.fork();
        thread::scope(|scope| -> Result<(), CommError> {
            let saver = scope.spawn(|| -> Result<(), CommError> {
                let saving = saving;
                let comm = saving.comm_for("save", &table.for_rank(saving.rank()), GroupKind::Tp);
                for save in 0..20 {
                    assert_eq!(comm.gather_bytes("published", &[save])?, vec![vec![save]; 3]);
                }
                Ok(())
            });
            let comm = comm(context);
            for step in 100..120 {
                assert_eq!(comm.gather_bytes("step", &[step])?, vec![vec![step]; 3]);
            }
            saver.join().unwrap()
        })
    });
    outcomes.into_iter().for_each(Result::unwrap);
}

#[test]
fn the_first_cause_is_named_on_every_rank_and_its_own_error_is_kept() {
    let started = Instant::now();
    let outcomes = run_on(4, TIMEOUT, |context| {
        let comm = comm(context);
        comm.gather_bytes("together", &[])?;
        match context.rank() {
            Rank(2) => panic!("out of paper"),
            _ => comm.gather_bytes("without", &[]),
        }
    });
    assert!(started.elapsed() < Duration::from_secs(10), "nobody waits for the time-out");
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let first = outcome.unwrap_err().first;
        assert_eq!((first.rank, first.reason.to_string()), (Rank(2), "panicked: out of paper".into()));
        assert_eq!(matches!(first.reason, Reason::Panic(_)), rank == 2);
    }
}

#[test]
fn ranks_that_disagree_or_wait_for_each_other_are_named() {
    let outcomes = run_on(2, TIMEOUT, |context| {
        let comm = comm(context);
        let site = if context.rank() == Rank(0) { "here" } else { "there" };
        comm.gather_bytes(site, &[])
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("gather_bytes `here`") && error.contains("gather_bytes `there`"), "{error}");
    }
    let outcomes = run_on(2, TIMEOUT, |context| match context.rank() {
        Rank(0) => comm(context).gather_bytes("alone", &[]).map(drop),
        _ => Ok(()),
    });
    let error = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("deadlock: rank 0 waits in m/tp[0] operation 0"), "{error}");
}

/// A connection of rank 1 of 2 that rank 0 has been waiting for.
fn joined_as_rank_1(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let hello = Request::Hello { program: super::hub::PROGRAM.into(), job: job(address) };
    wire::write(&mut stream, &hello).unwrap();
    wire::write(&mut stream, &Request::Join { rank: Rank(1), num_ranks: 2, place: Place::Rank }).unwrap();
    let _: wire::Reply = wire::read(&mut stream).unwrap();
    let _: wire::Reply = wire::read(&mut stream).unwrap();
    stream
}

/// How rank 0 of 2 ends when rank 1 joins and does this.
fn rank_0_beside(rank_1: impl FnOnce(&mut TcpStream)) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let hub = Hub::serve(listener, &job(address), 2, TIMEOUT).unwrap();
    let environment = Launch::environment(0, 2, address, WORD);
    let launch = Launch::from_environment(|name| {
        environment.iter().find(|(said, _)| *said == name).map(|(_, value)| value.clone())
    });
    let outcome = thread::scope(|scope| {
        let rank_0 = scope.spawn(move || {
            run(&launch.unwrap().unwrap(), TIMEOUT, &Arc::default(), |context| {
                comm(context).gather_bytes("together", &[])
            })
        });
        let mut stream = joined_as_rank_1(address);
        rank_1(&mut stream);
        let outcome = rank_0.join().unwrap();
        drop(stream);
        outcome
    });
    hub.finish();
    outcome.unwrap_err().to_string()
}

#[test]
fn a_connection_that_breaks_is_a_failed_rank() {
    let said = rank_0_beside(|stream| stream.shutdown(Shutdown::Both).unwrap());
    assert_eq!(said, "rank 1 failed: its process ended, or cannot be reached any more");
}

#[test]
fn a_rank_that_asks_for_what_cannot_be_is_the_one_that_failed() {
    let beside = |request: Request| rank_0_beside(|stream| wire::write(stream, &request).unwrap());
    let group = |ranks: &[u32], position| Request::Group {
        membership: Membership {
            id: GroupId { model: "m".into(), kind: GroupKind::Dp, index: 0, purpose: "" },
            ranks: ranks.iter().copied().map(Rank).collect(),
            position,
        },
    };
    for (request, why) in [
        (group(&[0, 7], 0), "m/dp[0] has rank 7, the world has 2 ranks"),
        (group(&[0, 1], 0), "rank 1 is not at position 0 of m/dp[0]"),
        (group(&[1], 1), "rank 1 is not at position 1 of m/dp[0]"),
        (Request::Collect { group: 0, sequence: 0 }, "asked for operation 0 of group 0 without its part"),
        (
            Request::Announce { group: 3, signature: OpSignature::Bytes { site: "there" } },
            "spoke of a group 3 that it had not named",
        ),
    ] {
        assert_eq!(beside(request), format!("rank 1 failed: {why}"));
    }
}

#[test]
fn a_rank_may_come_later_than_a_stranger_may_stay() {
    let outcomes = run_after(
        2,
        TIMEOUT,
        |rank| rank * (GRACE + Duration::from_secs(1)),
        |context| comm(context).gather_bytes("together", &[]),
    );
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn whoever_does_not_come_is_named() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let timeout = Duration::from_millis(300);
    let hub = Hub::serve(listener, &job(address), 3, timeout).unwrap();
    let environment = Launch::environment(0, 3, address, WORD);
    let launch = Launch::from_environment(|name| {
        environment.iter().find(|(said, _)| *said == name).map(|(_, value)| value.clone())
    });
    let outcome = run(&launch.unwrap().unwrap(), timeout, &Arc::default(), |_| Ok::<(), CommError>(()));
    let Reason::NotJoined(LaunchError::Refused { why }) = outcome.unwrap_err().first.reason else {
        panic!("rank 0 was refused");
    };
    assert_eq!(why, "rank 1 did not join within 300ms; missing: 1, 2");
    hub.finish();
}

#[test]
fn behind_torchrun_ranks_find_the_hub_past_its_agent_and_past_other_jobs() {
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // The agent's port, with room for sixteen after it.
    let (agent, other) = loop {
        let agent = listen();
        let port = agent.local_addr().unwrap().port();
        if port > 65_000 {
            continue;
        }
        if let Ok(other) = TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)) {
            break (agent, other);
        }
    };
    let port = agent.local_addr().unwrap().port();
    let stranger = Hub::serve(other, "another job", 2, TIMEOUT).unwrap();
    let run_rank = |rank: u32| {
        let launch = Launch::from_environment(|name| {
            let value = match name {
                "RANK" | "LOCAL_RANK" => rank.to_string(),
                "WORLD_SIZE" => "2".into(),
                "MASTER_ADDR" => "127.0.0.1".into(),
                "MASTER_PORT" => port.to_string(),
                "TORCHELASTIC_RUN_ID" => "run".into(),
                _ => return None,
            };
            Some(value)
        });
        run(&launch.unwrap().unwrap(), TIMEOUT, &Arc::default(), |context| {
            comm(context).gather_bytes("together", &[context.rank().0 as u8])
        })
    };
    let outcomes = thread::scope(|scope| {
        let ranks = [1, 0].map(|rank| scope.spawn(move || run_rank(rank)));
        ranks.map(|rank| rank.join().unwrap().unwrap())
    });
    assert_eq!(outcomes, [[[0], [1]], [[0], [1]]]);
    stranger.finish();
}

#[test]
fn the_launcher_asks_all_ranks_to_stop() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let hub = Hub::serve(listener, &job(address), 2, TIMEOUT).unwrap();
    let run_rank = |rank| {
        let environment = Launch::environment(rank, 2, address, WORD);
        let launch = Launch::from_environment(|name| {
            environment.iter().find(|(said, _)| *said == name).map(|(_, value)| value.clone())
        });
        let stop = Arc::new(AtomicBool::new(false));
        run(&launch.unwrap().unwrap(), TIMEOUT, &stop, |_| {
            let started = Instant::now();
            while !stop.load(Ordering::Relaxed) && started.elapsed() < TIMEOUT {
                thread::sleep(Duration::from_millis(5));
            }
            Ok::<bool, CommError>(stop.load(Ordering::Relaxed))
        })
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || run_rank(rank)));
        hub.ask_to_stop();
        assert_eq!(ranks.map(|rank| rank.join().unwrap().unwrap()), [true, true]);
    });
    hub.finish();
}
