//! `remesh train` as its own launcher: a process for each rank on this machine, ended together.

use super::Signals;
use crate::output::{complain, count};
use anyhow::Context;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use train::comm::processes::{Hub, Launch};

/// How often the processes are looked after.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long the others may go on once one has failed.
const GRACE: Duration = Duration::from_secs(20);
/// The exit code where a rank has none: a signal ended it.
const ENDED: u8 = 70;

/// Starts this very command once for each rank and returns when all have ended: with the exit code of the one that failed first.
pub(super) fn run(num_ranks: u32, timeout: Duration, signals: &Signals) -> anyhow::Result<ExitCode> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listening for the ranks of the job")?;
    let address = listener.local_addr().context("listening for the ranks of the job")?;
    let hub = Hub::serve(listener, &address.to_string(), num_ranks, timeout)
        .context("serving the ranks of the job")?;
    let program = std::env::current_exe().context("finding this program")?;
    let mut ranks = Ranks::default();
    for rank in 0..num_ranks {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).envs(Launch::environment(rank, num_ranks, address));
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("starting {}", count(num_ranks, "process of the job")))?;
        ranks.0.push(Rank { child, status: None });
    }
    // From here on a signal is passed on, and a second one ends everything.
    signals.training_begins();
    let mut failed_at: Option<Instant> = None;
    while ranks.look()? {
        if signals.stop.load(Ordering::Relaxed) {
            hub.ask_to_stop();
        }
        if failed_at.is_none() && ranks.0.iter().any(Rank::has_failed) {
            failed_at = Some(Instant::now());
        }
        if failed_at.is_some_and(|at| at.elapsed() > GRACE) {
            ranks.kill();
        }
        thread::sleep(INTERVAL);
    }
    let blamed = hub.first_cause().map(|(rank, _)| rank.index());
    hub.finish();
    Ok(ranks.exit_code(blamed))
}

/// The processes; those that still run when this is dropped are killed.
#[derive(Default)]
struct Ranks(Vec<Rank>);

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
}

impl Rank {
    /// Whether it ended otherwise than well, or well before its time.
    fn has_failed(&self) -> bool {
        self.status.is_some_and(|status| !status.success() && status.code() != Some(75))
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
            let _ = rank.child.kill();
        }
    }

    /// That of the rank to blame, if it failed; else of the first one that failed, else of the first.
    fn exit_code(&self, blamed: Option<usize>) -> ExitCode {
        let of_blamed = blamed.filter(|rank| self.0[*rank].has_failed());
        let rank = of_blamed.or_else(|| self.0.iter().position(Rank::has_failed)).unwrap_or(0);
        let status = self.0[rank].status.expect("all have ended");
        match (status.code(), status.signal()) {
            (Some(code), _) => ExitCode::from(code as u8),
            (None, signal) => {
                complain(format!("rank {rank} was ended by signal {}", signal.unwrap_or_default()));
                ExitCode::from(ENDED)
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for rank in &mut self.0 {
            let _ = rank.child.wait();
        }
    }
}
