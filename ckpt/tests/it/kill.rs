//! A process that is killed while it saves to a local folder.

use crate::support::*;
use ckpt::Store;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ROOT: &str = "CKPT_TEST_ROOT";

/// Run by the test below in a process of its own; alone it has nowhere to save.
#[test]
#[ignore = "saves until it is killed"]
fn saves_until_it_is_killed() {
    let Ok(root) = std::env::var(ROOT) else { return };
    let store = Store::open(&root).unwrap();
    let first = store.steps().unwrap().last().map_or(1, |step| step + 1);
    for step in first.. {
        save_labelled(&store, step, &model(), Degrees { dp: 2, ..ONE });
    }
}

/// Whenever it happens, the newest whole step loads, and only the step that was being saved is passed over.
#[test]
fn a_kill_leaves_the_step_before() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let (mut newest, mut interrupted) = (0, 0);
    for round in 0..24 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["kill::saves_until_it_is_killed", "--exact", "--ignored"])
            .env(ROOT, root.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while store.latest(None).unwrap().checkpoint.is_none_or(|latest| latest.step() <= newest) {
            // A save takes milliseconds; a minute is for a machine that does much else.
            if start.elapsed() > Duration::from_mins(1) || child.try_wait().unwrap().is_some() {
                child.kill().unwrap();
                panic!("no step after {newest}: {}", child.wait().unwrap());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(500 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let latest = store.latest(None).unwrap();
        let checkpoint = latest.checkpoint.unwrap();
        assert!(latest.passed_over.len() <= 1, "{:?}", latest.passed_over);
        assert!(latest.passed_over.iter().all(|step| step.step == checkpoint.step() + 1));
        assert_eq!(checkpoint.verify().unwrap().faults.len(), 0);
        newest = checkpoint.step() + latest.passed_over.len() as u64;
        interrupted += latest.passed_over.len();
    }
    assert!(interrupted > 0, "some kill came in the middle of a save");
    assert_loads_labelled(&store.latest(None).unwrap().checkpoint.unwrap(), &model(), ONE);
}
