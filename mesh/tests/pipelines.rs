//! Layers over pipeline stages: counts and offsets against the rule, worked splits, stage layouts, refusals, and which
//! stages hold which tensor.

use expect_test::expect;
use mesh::{
    DimPlacement, GroupKind, GroupTable, LayoutSizes, ModelPart, ParallelLayout, Pipeline, PipelineError,
    PipelineSplit, Placement, Rank, Region, StageLayout,
};
use std::ops::Range;
use std::sync::Arc;

/// Layers of each chunk of each stage.
fn stages(pipeline: &Pipeline, num_chunks: u32) -> Vec<Vec<Range<u32>>> {
    let chunks = |stage| (0..num_chunks).map(|chunk| pipeline.layers(stage, chunk)).collect();
    (0..pipeline.num_stages()).map(chunks).collect()
}

const fn even(account_for_embedding: bool, account_for_loss: bool) -> PipelineSplit {
    PipelineSplit::Even { account_for_embedding, account_for_loss }
}

#[test]
fn worked_splits() {
    let interleaved = Pipeline::new(8, 4, 2, &PipelineSplit::EVEN).unwrap();
    assert_eq!(stages(&interleaved, 2), [[0..1, 4..5], [1..2, 5..6], [2..3, 6..7], [3..4, 7..8]]);
    let accounted = Pipeline::new(6, 2, 2, &even(true, true)).unwrap();
    assert_eq!(stages(&accounted, 2), [[0..1, 3..5], [1..3, 5..6]]);
    let first_last = PipelineSplit::FirstLast { first: Some(2), last: Some(2) };
    let uneven = Pipeline::new(10, 4, 1, &first_last).unwrap();
    assert_eq!(stages(&uneven, 1).concat(), [0..2, 2..5, 5..8, 8..10]);
}

/// Count and offset as the rule writes them, chunk by chunk; `None` where it refuses.
fn by_rule(l: u32, pp: u32, vpp: u32, split: &PipelineSplit) -> Option<Vec<Vec<Range<u32>>>> {
    let exact = |a: u32, b: u32| a.is_multiple_of(b).then(|| a / b);
    let mut all = Vec::new();
    for p in 0..pp {
        let mut chunks = Vec::new();
        for v in 0..vpp {
            let (count, offset) = match split {
                PipelineSplit::Even { account_for_embedding, account_for_loss } => {
                    let (ae, al) = (u32::from(*account_for_embedding), u32::from(*account_for_loss));
                    let t = l + ae + al;
                    let k = exact(exact(t, pp)?, vpp)?;
                    let is_first = p == 0 && v == 0;
                    let is_last = p == pp - 1 && v == vpp - 1;
                    let count = k - if is_first { ae } else { 0 } - if is_last { al } else { 0 };
                    (count, v * (t / vpp) + p * k - if is_first { 0 } else { ae })
                }
                PipelineSplit::FirstLast { first, last } => {
                    let (f, z) = (first.unwrap_or(0), last.unwrap_or(0));
                    let given = u32::from(first.is_some());
                    let m = pp.checked_sub(given + u32::from(last.is_some()))?;
                    let between = l.checked_sub(f + z)?;
                    let middle = if m > 0 { exact(between, m)? } else { exact(between, u32::MAX)? };
                    for stage in [f, z].into_iter().chain((m > 0).then_some(middle)) {
                        exact(stage, vpp)?;
                    }
                    let count = match p {
                        0 if first.is_some() => f,
                        p if p == pp - 1 && last.is_some() => z,
                        _ => middle,
                    } / vpp;
                    let total = f / vpp + between / vpp + z / vpp;
                    let before = if p == 0 { 0 } else { f / vpp + (p - given) * (middle / vpp) };
                    (count, v * total + before)
                }
                PipelineSplit::Stages(_) => unreachable!("a stage layout is its own rule"),
            };
            chunks.push(offset..offset + count);
        }
        all.push(chunks);
    }
    Some(all)
}

#[test]
fn counts_and_offsets_are_those_of_the_rule_for_every_small_pipeline() {
    let counts = || [None].into_iter().chain((0..5).map(Some));
    let mut splits: Vec<PipelineSplit> =
        [(false, false), (true, false), (false, true), (true, true)].map(|(e, l)| even(e, l)).into();
    splits.extend(
        counts().flat_map(|first| counts().map(move |last| PipelineSplit::FirstLast { first, last })),
    );
    let (mut admitted, mut refused) = (0, 0);
    for split in &splits {
        for (pp, vpp) in (1..=5).flat_map(|pp| (1..=3).map(move |vpp| (pp, vpp))) {
            for layers in 1..=24 {
                let found = Pipeline::new(layers, pp, vpp, split);
                let Some(expected) = by_rule(layers, pp, vpp, split) else {
                    assert!(found.is_err(), "{layers} layers, PP {pp}, VPP {vpp}, {split:?}");
                    refused += 1;
                    continue;
                };
                let pipeline = found.unwrap();
                assert_eq!(
                    stages(&pipeline, vpp),
                    expected,
                    "{layers} layers, PP {pp}, VPP {vpp}, {split:?}"
                );
                for layer in 0..layers {
                    let stage = pipeline.stage_of(layer).unwrap();
                    assert!(expected[stage as usize].iter().any(|chunk| chunk.contains(&layer)));
                }
                assert_eq!(pipeline.stage_of(layers), None);
                admitted += 1;
            }
        }
    }
    assert!(admitted > 1000 && refused > 1000, "{admitted} and {refused}");
}

#[test]
fn the_layout_that_a_refusal_offers_works() {
    let refusal = |layers, pp, vpp, split: &PipelineSplit| {
        let error = Pipeline::new(layers, pp, vpp, split).unwrap_err();
        let help = error.help();
        let layout: StageLayout = help.split('\'').nth(1).unwrap().parse().unwrap();
        Pipeline::new(layers, pp, vpp, &PipelineSplit::Stages(layout)).unwrap();
        format!("{} {error}\nhelp: {help}", error.code())
    };
    expect![[r#"
        RM2009 layers 10 ÷ 4 is not exact
        help: `--pipeline-model-parallel-layout 'Et*3|t*3|tt|ttL'` works"#]]
    .assert_eq(&refusal(10, 4, 1, &PipelineSplit::EVEN));
    expect![[r#"
        RM2009 layers of a stage 2 ÷ 3 is not exact
        help: `--pipeline-model-parallel-layout 'Et|t|t|t|t|t|t|t||||L'` works"#]]
    .assert_eq(&refusal(8, 4, 3, &PipelineSplit::EVEN));
    expect![[r#"
        RM2009 layers with embedding and loss 9 ÷ 4 is not exact
        help: `--pipeline-model-parallel-layout 'Ett|tt|tt|tL'` works"#]]
    .assert_eq(&refusal(7, 4, 1, &even(true, true)));
    let first = PipelineSplit::FirstLast { first: Some(3), last: None };
    expect![[r#"
        RM2009 layers between first and last stage 7 ÷ 3 is not exact
        help: `--pipeline-model-parallel-layout 'Et*3|t*3|tt|ttL'` works"#]]
    .assert_eq(&refusal(10, 4, 1, &first));
    let both = PipelineSplit::FirstLast { first: Some(3), last: Some(4) };
    expect![[r#"
        RM2009 first and last of 2 stages take 7 of 10 layers
        help: `--pipeline-model-parallel-layout 'Et*5|t*5L'` works"#]]
    .assert_eq(&refusal(10, 2, 1, &both));
    let short = PipelineSplit::Stages("Et|tL".parse().unwrap());
    expect![[r#"
        RM2009 the stage layout has 2 layers in 2 chunks; the model has 10, the pipeline 4 stages
        help: `--pipeline-model-parallel-layout 'Et*3|t*3|tt|ttL'` works"#]]
    .assert_eq(&refusal(10, 4, 1, &short));
    let none = Pipeline::new(4, 0, 1, &PipelineSplit::EVEN).unwrap_err();
    assert!(matches!(none, PipelineError::Zero { .. }), "{none}");
}

#[test]
fn a_stage_layout_is_read_as_it_is_written() {
    for (text, written) in [
        ("Ett|tt|ttL", "Ett|tt|ttL"),
        ("Et*3|(tt|)*2,t|L", "Et*3|tt|tt|t|L"),
        ("E | t*4 | L", "E|t*4|L"),
        ("EL", "EL"),
    ] {
        let layout: StageLayout = text.parse().unwrap();
        assert_eq!(layout.to_string(), written);
        assert_eq!(written.parse::<StageLayout>().unwrap(), layout);
    }
    // The embedding alone on the first stage, the loss alone on the last.
    let pipeline = Pipeline::new(4, 3, 1, &PipelineSplit::Stages("E|t*4|L".parse().unwrap())).unwrap();
    assert_eq!(stages(&pipeline, 1).concat(), [0..0, 0..4, 4..4]);
    for (text, reason) in [
        ("tt|ttL", "it begins with the embedding `E` and ends with the loss `L`"),
        ("Ett|Ett|L", "embedding and loss are there once"),
        ("E(tt|L", "a bracket does not close"),
        ("Ett)|L", "a bracket closes that was not opened"),
        ("Et*|L", "a number follows `*`"),
        ("Et|mL", "there are no layers for multi-token prediction"),
        ("Ex|L", "its symbols are E, t, L, |, *, brackets and numbers"),
        ("Et*4000000000|L", "it is too long"),
        ("E((((((((((t))))))))))L", "brackets are too deep"),
    ] {
        assert_eq!(text.parse::<StageLayout>().unwrap_err().reason, reason, "{text}");
    }
}

/// `pp` stages of TP 2.
fn table(pp: u32, pipeline: Pipeline) -> Arc<GroupTable> {
    let sizes = LayoutSizes { world_size: 2 * pp, tp: 2, pp, ..ParallelLayout::single().sizes() };
    Arc::new(GroupTable::new("gpt", &ParallelLayout::new(sizes).unwrap()).with_pipeline(pipeline))
}

#[test]
fn a_tensor_lies_on_the_stages_of_its_part_and_nowhere_else() {
    // Layers 0 and 3 on the first stage, 1 and 4 on the second, 2 and 5 on the third.
    let table = table(3, Pipeline::new(6, 3, 2, &PipelineSplit::EVEN).unwrap());
    let matrix = |part| {
        let rows = DimPlacement::whole(8).exact(GroupKind::Tp);
        Placement::new(vec![rows, DimPlacement::whole(4)]).of(part)
    };
    // On the stage of rank 2 · stage + TP position: the copy of the pipeline, if it holds one.
    let copies = |part| {
        (0..6)
            .map(|rank| {
                let shard = matrix(part).shard(&table.for_rank(Rank(rank))).unwrap();
                let rows = u64::from(rank % 2) * 4;
                match shard.pieces.as_slice() {
                    [] => {
                        assert_eq!(shard.shape.numel(), 0);
                        None
                    }
                    [piece] => {
                        assert_eq!(piece.region, Region::new(&[rows, 0], &[rows + 4, 4]));
                        assert_eq!(shard.replica.tp, 0);
                        Some(shard.replica.pp)
                    }
                    pieces => panic!("{pieces:?}"),
                }
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(copies(ModelPart::Layer(4)), [None, None, Some(0), Some(0), None, None]);
    assert_eq!(copies(ModelPart::Layer(5)), [None, None, None, None, Some(0), Some(0)]);
    assert_eq!(copies(ModelPart::FirstStage), [Some(0), Some(0), None, None, None, None]);
    assert_eq!(copies(ModelPart::LastStage), [None, None, None, None, Some(0), Some(0)]);
    assert_eq!(copies(ModelPart::BothEnds), [Some(0), Some(0), None, None, Some(1), Some(1)]);
    assert_eq!(copies(ModelPart::EveryStage), [0, 0, 1, 1, 2, 2].map(Some));
    // A layer that the model does not have is nowhere.
    assert_eq!(copies(ModelPart::Layer(6)), [None; 6]);
    // What is on the same stages is divided alike.
    let of = |part| matrix(part).representative(&table);
    assert_eq!(of(ModelPart::Layer(4)), of(ModelPart::Layer(1)));
    assert_ne!(of(ModelPart::Layer(4)), of(ModelPart::Layer(5)));
}

#[test]
fn stages_are_those_of_the_models_own_groups() {
    // The collection of a model whose pipelines run backwards through its ranks.
    let pipeline = Pipeline::new(2, 2, 1, &PipelineSplit::EVEN).unwrap();
    let backwards = vec![mesh::Group::new(vec![Rank(1), Rank(0)])];
    let table = GroupTable::empty("teacher", vec![Rank(0), Rank(1)])
        .with(GroupKind::Pp, Some(backwards))
        .with_pipeline(pipeline);
    let table = Arc::new(table);
    let norm = Placement::new(vec![DimPlacement::whole(4)]).of(ModelPart::Layer(0));
    let held = [0, 1].map(|rank| norm.shard(&table.for_rank(Rank(rank))).unwrap().pieces.len());
    assert_eq!(held, [0, 1]);
}
