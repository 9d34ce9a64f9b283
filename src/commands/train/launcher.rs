//! `remesh train` as its own launcher: a process for each rank on this machine, ended together.

use super::Signals;
use crate::output::count;
use crate::report::Refusal;
use anyhow::Context;
use mesh::Rank;
use signal_hook::consts::{
    SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGINT, SIGSEGV, SIGSYS, SIGTERM, SIGTRAP, SIGUSR1,
};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use train::comm::CommError;
use train::comm::processes::{Hub, Launch};

/// How often the processes are looked after.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long the others may go on once one has failed.
const GRACE: Duration = Duration::from_secs(20);
/// The exit code of a rank that was asked to stop and has saved.
const STOPPED: i32 = 75;

/// Starts this very command once for each rank and returns when all have ended: with the exit code of the one that failed first.
pub(super) fn run(num_ranks: u32, timeout: Duration, signals: &Signals) -> anyhow::Result<ExitCode> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listening for the ranks of the job")?;
    let address = listener.local_addr().context("listening for the ranks of the job")?;
    let word = format!("{:016x}", RandomState::new().build_hasher().finish());
    let hub = Hub::serve(listener, &format!("{address}/{word}"), num_ranks, timeout)
        .context("serving the ranks of the job")?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut ranks = Ranks::default();
    for rank in 0..num_ranks {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).envs(Launch::environment(rank, num_ranks, address, &word));
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("starting {}", count(num_ranks, "process of the job")))?;
        ranks.0.push(Process { child, status: None, is_killed: false });
    }
    // From here on a signal is passed on, and a second one ends everything.
    signals.training_begins();
    let mut failed_at: Option<Instant> = None;
    while ranks.look()? {
        let is_stopping = signals.stop.load(Ordering::Relaxed);
        if is_stopping {
            hub.ask_to_stop();
        }
        if failed_at.is_none()
            && let Some((rank, status)) = ranks.first_failed(is_stopping)
        {
            failed_at = Some(Instant::now());
            // Those that have not met would wait for it.
            hub.fail(rank, failure(rank, status));
        }
        if failed_at.is_some_and(|at| at.elapsed() > GRACE) {
            ranks.kill();
        }
        thread::sleep(INTERVAL);
    }
    let blamed = hub.first_cause().map(|(rank, _)| rank);
    hub.finish();
    ranks.exit_code(blamed, signals)
}

/// What the others are told of a rank whose process ended like this.
fn failure(rank: Rank, status: ExitStatus) -> CommError {
    match status.signal() {
        Some(signal) => {
            CommError::PeerLost { rank, why: format!("its process was ended by signal {signal}") }
        }
        None => CommError::PeerFailed { rank, why: format!("its process ended with {status}") },
    }
}

/// The processes by rank; those that still run when this is dropped are killed.
#[derive(Default)]
struct Ranks(Vec<Process>);

struct Process {
    child: Child,
    status: Option<ExitStatus>,
    /// By the launcher.
    is_killed: bool,
}

impl Process {
    /// How it ended, if by itself and otherwise than well, or well before its time, or as it was asked to.
    fn failure(&self, is_stopping: bool) -> Option<ExitStatus> {
        let is_fine = |status: &ExitStatus| match status.code() {
            Some(0 | STOPPED) => true,
            Some(code) => is_stopping && [SIGINT, SIGTERM, SIGUSR1].contains(&(code - 128)),
            None => false,
        };
        self.status.filter(|status| !self.is_killed && !is_fine(status))
    }
}

impl Ranks {
    /// Whether any still runs.
    fn look(&mut self) -> anyhow::Result<bool> {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            rank.status = rank.child.try_wait().context("looking after the processes of the job")?;
        }
        Ok(self.0.iter().any(|rank| rank.status.is_none()))
    }

    fn kill(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            // One that has ended by itself cannot be killed.
            rank.is_killed |= rank.child.kill().is_ok();
        }
    }

    fn first_failed(&self, is_stopping: bool) -> Option<(Rank, ExitStatus)> {
        let mut failed = self.0.iter().zip(0..);
        failed.find_map(|(process, rank)| Some((Rank(rank), process.failure(is_stopping)?)))
    }

    /// That of the rank to blame, if it failed; else of the first one that failed. Where none has, all have ended alike.
    fn exit_code(&self, blamed: Option<Rank>, signals: &Signals) -> anyhow::Result<ExitCode> {
        let is_stopping = signals.stop.load(Ordering::Relaxed);
        let of_blamed = blamed.and_then(|rank| Some((rank, self.0[rank.index()].failure(is_stopping)?)));
        let Some((rank, status)) = of_blamed.or_else(|| self.first_failed(is_stopping)) else {
            let status = self.0[0].status.expect("all have ended");
            return Ok(match status.code() {
                Some(code @ (0 | STOPPED)) => ExitCode::from(code as u8),
                _ => signals.stopped_code(),
            });
        };
        match (status.code(), status.signal()) {
            // It has said why.
            (Some(code), _) => Ok(ExitCode::from(code as u8)),
            (None, Some(signal @ (SIGABRT | SIGBUS | SIGFPE | SIGILL | SIGSEGV | SIGSYS | SIGTRAP))) => {
                let message = format!("rank {rank} crashed with signal {signal}");
                Err(Refusal::new("RM9002", message, "this is a fault of the program; please report it")
                    .into())
            }
            (None, _) => Err(failure(rank, status).into()),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for rank in &mut self.0 {
            // It was killed, and there is nobody left to tell.
            let _ = rank.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Process, Ranks, Signals, failure};
    use mesh::Rank;
    use std::process::{Command, Stdio};

    /// A process for each of these scripts.
    fn ranks(scripts: &[&str]) -> Ranks {
        let start = |script: &&str| {
            let child = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
            Process { child, status: None, is_killed: false }
        };
        Ranks(scripts.iter().map(start).collect())
    }

    #[test]
    fn a_rank_that_its_launcher_killed_is_not_to_blame() {
        let signals = Signals::register().unwrap();
        let mut ranks = ranks(&["exec sleep 600", "exit 3"]);
        while ranks.first_failed(false).is_none() {
            assert!(ranks.look().unwrap());
        }
        let (rank, status) = ranks.first_failed(false).unwrap();
        assert_eq!(failure(rank, status).to_string(), "rank 1 failed: its process ended with exit status: 3");
        ranks.kill();
        while ranks.look().unwrap() {}
        // Even if others say so, who only know that it is gone.
        for blamed in [None, Some(Rank(0))] {
            let code = ranks.exit_code(blamed, &signals).unwrap();
            assert_eq!(code, std::process::ExitCode::from(3));
        }
    }
}
