//! Random streams keyed by the model's own process groups: what continues, what is derived, and that no rank ever gets
//! another coordinate's stream.

use crate::support::{self, Layout, tiny_model};
use ckpt::{Saver, Store};
use expect_test::expect;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use train::backend::Device;
use train::comm::threads::{World, WorldOptions};
use train::config::TrainConfig;
use train::data::Blend;
use train::resume::{Level, Resume, RngPolicy, Selection};
use train::rng::StreamName;
use train::run::{Job, RankRun, RunError, RunName, SavePolicy, Trainable};

/// Next eight words of each stream a rank has, by stream.
type Next = Vec<Option<Vec<u32>>>;

fn next_words(rank: &mut RankRun) -> Next {
    let words = |stream: &mut train::rng::Stream| (0..8).map(|_| stream.next_u32()).collect();
    StreamName::ALL.map(|name| rank.streams().get(name).map(words)).into()
}

fn config(layout: Layout) -> TrainConfig {
    support::config(tiny_model(4), layout.parallel(64, 8).unwrap(), 10)
}

/// One step from scratch, then rank r draws r + 1 words from each of its streams and all save. What they would draw next.
fn save(layout: Layout, tokens: &Blend, store: &Store) -> Vec<Next> {
    in_world(layout, tokens, store, None, |rank, policy, position| {
        rank.step()?;
        for name in StreamName::ALL {
            if let Some(stream) = rank.streams().get(name) {
                (0..=position).for_each(|_| _ = stream.next_u32());
            }
        }
        rank.save(policy, true)?;
        Ok(next_words(rank))
    })
    .unwrap()
}

/// What ranks draw next after a resume from step 1, and what the resume said.
fn resume(
    layout: Layout,
    tokens: &Blend,
    store: &Store,
    rng_policy: RngPolicy,
) -> Result<(Vec<Next>, Option<Level>), String> {
    resume_from(1, layout, tokens, store, rng_policy)
}

fn resume_from(
    step: u64,
    layout: Layout,
    tokens: &Blend,
    store: &Store,
    rng_policy: RngPolicy,
) -> Result<(Vec<Next>, Option<Level>), String> {
    let saved = store.checkpoint(step).unwrap();
    let resume = Resume {
        source: &saved,
        selection: Selection::ALL,
        allow_missing: &[],
        allow_extra: &[],
        rng_policy,
        allow_change: &[],
        strict: false,
    };
    let results = in_world(layout, tokens, store, Some(resume), |rank, _, _| {
        let resumed = rank.resume()?.expect("there is a checkpoint to resume from");
        Ok((next_words(rank), resumed.level))
    })?;
    let level = results[0].1;
    Ok((results.into_iter().map(|(next, _)| next).collect(), level))
}

fn in_world<R: Send>(
    layout: Layout,
    tokens: &Blend,
    store: &Store,
    resume: Option<Resume>,
    body: impl Fn(&mut RankRun, &SavePolicy, u32) -> Result<R, RunError> + Sync,
) -> Result<Vec<R>, String> {
    let config = config(layout);
    let saver = |exchange| Saver::new(store.clone(), exchange);
    let policy = || SavePolicy {
        interval: 0,
        saver: &saver,
        writer: RunName { run: "test".into(), host: "here".into(), pid: 1, program: "it".into() },
        now: || "2026-11-30T00:00:00Z".into(),
    };
    let stop = AtomicBool::new(false);
    let job = Job {
        run: Trainable::new(&config, tokens, resume).map_err(|error| error.to_string())?,
        device: Device::Cpu,
        save: Some(policy()),
        timeout: Job::TIMEOUT,
        stop: &stop,
        observer: &|_| Ok(()),
    };
    let table = Arc::new(mesh::GroupTable::new("model", config.parallel.layout()));
    let ranks = World::run(layout.world_size(), WorldOptions::default(), |context| {
        let groups = table.for_rank(context.rank());
        let mut rank = RankRun::new(&job, &groups, "", context)?;
        body(&mut rank, &policy(), context.rank().0)
    });
    ranks.map_err(|error| error.first.reason.to_string())
}

const fn layout(tp: u32, cp: u32, gtp: u32, dp: u32) -> Layout {
    Layout { tp, sp: tp > 1, cp, gtp, nseq: 1, dp, mbs: 1 }
}

/// Each rank drew another number of words; each goes on with its own stream.
#[test]
fn under_the_same_layout_every_stream_continues() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    for layout in [layout(2, 1, 2, 1), layout(1, 2, 1, 2)] {
        let store = Store::open("memory://").unwrap();
        let expected = save(layout, &tokens, &store);
        let (found, level) = resume(layout, &tokens, &store, RngPolicy::Derive).unwrap();
        assert_eq!(found, expected, "{layout:?}");
        assert_eq!(level, Some(Level::L2));
    }
}

/// The streams agree over TP where they must, and differ elsewhere.
#[test]
fn derived_streams_are_the_same_each_time_and_differ_by_coordinate() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let saved = save(layout(1, 1, 1, 1), &tokens, &store);
    let wanted = layout(2, 1, 2, 1);
    let (first, level) = resume(wanted, &tokens, &store, RngPolicy::Derive).unwrap();
    let (again, _) = resume(wanted, &tokens, &store, RngPolicy::Derive).unwrap();
    assert_eq!(first, again, "derived twice at one step");
    assert_eq!(level, Some(Level::L1), "words were drawn that nobody continues");
    let words = |rank: usize, name: StreamName| first[rank][name as usize].clone().unwrap();
    for rank in 1..4 {
        assert_eq!(words(rank, StreamName::DataParallel), words(0, StreamName::DataParallel));
    }
    assert_ne!(words(0, StreamName::ModelParallel), words(1, StreamName::ModelParallel), "over TP");
    assert_eq!(words(0, StreamName::ModelParallel), words(2, StreamName::ModelParallel), "over GTP");
    assert_ne!(
        words(0, StreamName::ExpertParallel),
        words(1, StreamName::ExpertParallel),
        "ETP is TP by default"
    );
    assert_ne!(words(0, StreamName::GtpRemat), words(2, StreamName::GtpRemat), "over GTP");
    let name = StreamName::DataParallel as usize;
    assert_ne!(first[0][name], saved[0][name], "nobody gets another coordinate's words");
}

/// Whoever derives gets words that belong to the iteration, whatever the layout and the policy by which it derives.
#[test]
fn another_iteration_gives_every_rank_other_streams_and_the_same_one_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let saved_under = layout(1, 1, 1, 2);
    in_world(saved_under, &tokens, &store, None, |rank, policy, _| {
        for _ in 0..2 {
            rank.step()?;
            rank.save(policy, true)?;
        }
        Ok(())
    })
    .unwrap();
    // The layout that goes on, and how many of its ranks have coordinates that were saved.
    for (wanted, num_existing) in
        [(layout(2, 1, 1, 1), 1), (layout(1, 2, 1, 1), 1), (layout(2, 1, 1, 2), 2), (layout(1, 1, 1, 4), 2)]
    {
        for (policy, num_kept) in [(RngPolicy::Derive, 0), (RngPolicy::Existing, num_existing)] {
            let from = |step| resume_from(step, wanted, &tokens, &store, policy).unwrap().0;
            let (first, again, later) = (from(1), from(1), from(2));
            assert_eq!(first, again, "{wanted:?} {policy:?}");
            // Kept is what was saved at both steps: the stream of iteration 0, from which nobody drew.
            let is_kept = |(first, later): &(&Next, &Next)| first == later;
            assert_eq!(first.iter().zip(&later).filter(is_kept).count(), num_kept, "{wanted:?} {policy:?}");
            for (first, later) in first.iter().zip(&later).filter(|ranks| !is_kept(ranks)) {
                let streams: Vec<_> = first.iter().zip(later).filter(|(first, _)| first.is_some()).collect();
                assert!(!streams.is_empty(), "{wanted:?} {policy:?}");
                assert!(streams.iter().all(|(first, later)| first != later), "{wanted:?} {policy:?}");
            }
        }
    }
}

/// More replicas than were saved: coordinates that existed keep their streams, new ones derive.
#[test]
fn the_existing_policy_keeps_what_exists_and_counts_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let expected = save(layout(1, 2, 1, 2), &tokens, &store);
    // CP is faster than DP: which of the new ranks have the coordinates of the four, in their order.
    for (grown, same) in [(layout(1, 2, 1, 4), [0, 1, 2, 3]), (layout(1, 4, 1, 2), [0, 1, 4, 5])] {
        let (found, _) = resume(grown, &tokens, &store, RngPolicy::Existing).unwrap();
        assert_eq!(same.map(|rank: usize| found[rank].clone())[..], expected[..], "{grown:?}");
        let others = (0..8).filter(|rank| !same.contains(rank));
        assert!(others.into_iter().all(|rank| !expected.contains(&found[rank])), "{grown:?}");
        let (derived, _) = resume(grown, &tokens, &store, RngPolicy::Derive).unwrap();
        assert!(derived.iter().all(|next| !expected.contains(next)), "derive is one rule for all ranks");
    }
}

/// A stream that only one of the layouts has: derived where it is new, and gone where it is not known.
#[test]
fn a_kept_cell_has_the_streams_of_its_own_layout() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let gtp = StreamName::GtpRemat as usize;
    let without = Store::open("memory://").unwrap();
    let expected = save(layout(1, 1, 1, 2), &tokens, &without);
    let (found, _) = resume(layout(1, 1, 2, 1), &tokens, &without, RngPolicy::Existing).unwrap();
    let (derived, _) = resume(layout(1, 1, 2, 1), &tokens, &without, RngPolicy::Derive).unwrap();
    assert_eq!(found[0][..gtp], expected[0][..gtp], "the same coordinates");
    assert_eq!(found[0][gtp], derived[0][gtp]);
    assert!(found[0][gtp].is_some() && found[0][gtp] != found[1][gtp]);
    assert_eq!(found[1], derived[1], "no rank had GTP shard 1");

    let with = Store::open("memory://").unwrap();
    let expected = save(layout(1, 1, 2, 1), &tokens, &with);
    let (found, _) = resume(layout(1, 1, 1, 2), &tokens, &with, RngPolicy::Existing).unwrap();
    assert_eq!(found[0][..gtp], expected[0][..gtp]);
    assert!(found.iter().all(|next| next[gtp].is_none()), "without GTP there is no stream of it");
    // GTP shards of two are not those of four in other places.
    let (found, _) = resume(layout(1, 1, 4, 1), &tokens, &with, RngPolicy::Existing).unwrap();
    let of_gtp: std::collections::BTreeSet<_> = found.iter().map(|next| next[gtp].clone()).collect();
    assert_eq!(of_gtp.len(), 4, "each shard has its own");
}

#[test]
fn the_strict_policy_refuses_another_layout_naming_the_coordinate() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    save(layout(1, 1, 1, 1), &tokens, &store);
    let error = resume(layout(2, 1, 1, 1), &tokens, &store, RngPolicy::Strict).unwrap_err();
    expect!["random streams: saved under TP 1 · GTP 1 · CP 1 · DP 1 · world 1, but this run is TP 2 · GTP 1 · CP 1 · DP 1 · world 2; coordinate (pp 0, tp 1, position 0 of `dp_cp_gtp_remat`) has no cell"].assert_eq(&error);
    // As many cells, of other axes: still refused, never another coordinate's bytes.
    let two = Store::open("memory://").unwrap();
    save(layout(1, 2, 1, 1), &tokens, &two);
    let error = resume(layout(1, 1, 1, 2), &tokens, &two, RngPolicy::Strict).unwrap_err();
    expect!["random streams: saved under TP 1 · GTP 1 · CP 2 · DP 1 · world 2, but this run is TP 1 · GTP 1 · CP 1 · DP 2 · world 2; coordinate (pp 0, tp 0, position 1 of `dp_cp_gtp_remat`) has no cell"].assert_eq(&error);
    let shape = two.checkpoint(1).unwrap();
    let shape = &shape.catalog().tensor(&"rng_state".into()).unwrap().shape;
    assert_eq!(shape.dims(), [1, 1, 2, 5, 6]);
}
