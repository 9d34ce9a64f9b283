//! `remesh diff`: what two checkpoints have in common.

use super::{MODEL, ok, refused, remesh, text, with_tokens};
use expect_test::expect;
use serde_json::Value;

#[test]
fn the_same_state_under_two_layouts_is_the_same() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save one"));
    ok(folder, &format!("train {MODEL} --train-iters 2 --save other --tp 2 --cp 2 --nproc-per-node 4"));
    let said = ok(folder, "diff one other");
    let (tensors, fields) = said.split_once(" of the runs' records not\n").unwrap();
    assert!(tensors.starts_with("A  one step 2\nB  other step 2\n"), "{said}");
    assert!(
        tensors.contains(" tensors the same, 1 not\n  rng_state  streams of another layout: not compared\n")
    );
    assert!(fields.contains("  layout.world_size  "), "{said}");
    assert!(!fields.contains("counters"), "{said}");
    // Under the same layout, nothing at all differs.
    ok(folder, &format!("train {MODEL} --train-iters 2 --save again"));
    let said = ok(folder, "diff one again");
    assert!(said.ends_with(" tensors the same, 0 not\n"), "{said}");
}

#[test]
fn what_differs_is_named_and_measured() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save run --save-interval 1"));
    let output = remesh(folder, "diff run@1 run@2 --values --json");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let found: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert_eq!((&found["schema"], &found["same"]), (&"remesh.diff/1".into(), &false.into()));
    // One step of AdamW moves an element by about the learning rate, 1e-2, and by no more than a little above it.
    let norm = found["tensors"].as_array().unwrap().iter();
    let norm = norm.clone().find(|tensor| tensor["key"] == "decoder.final_layernorm.weight").unwrap();
    assert_eq!((&norm["what"], &norm["values"]["elements"]), (&"elements".into(), &16.into()));
    assert_eq!(norm["values"]["differing"], 16);
    assert_eq!(norm["values"]["first"]["index"], serde_json::json!([0]));
    let most = norm["values"]["max_abs"].as_f64().unwrap();
    assert!((1e-3..2e-2).contains(&most), "{most}");
    let steps: u64 = norm["values"]["steps"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(steps, 16, "each element is counted once");
    let said = text(&remesh(folder, "diff run@1 run@2 --values").stdout);
    let line = said.lines().find(|line| line.contains("decoder.final_layernorm.weight")).unwrap();
    assert!(line.contains("  16 of 16 elements differ, first [0]: "), "{line}");
    assert!(said.contains("  counters.consumed_train_samples  "), "{said}");

    ok(folder, &format!("train {MODEL} --train-iters 1 --save wider --ffn-hidden-size 32"));
    let said = text(&remesh(folder, "diff run@1 wider").stdout);
    assert!(said.contains("  decoder.layers.0.mlp.linear_fc2.weight"), "{said}");
    assert!(said.contains("16 × 16 → 16 × 32\n"), "{said}");
    ok(folder, &format!("train {MODEL} --train-iters 1 --save tied --tie-embeddings"));
    let said = text(&remesh(folder, "diff run@1 tied").stdout);
    assert!(said.contains("  output_layer.weight") && said.contains("only in A\n"), "{said}");
}

#[test]
fn manual_and_completions_know_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let help = ok(folder, "--help");
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands
        .filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')))
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    assert!(commands.contains(&"train") && commands.contains(&"diff"), "{commands:?}");
    let completions = ok(folder, "completions bash");
    ok(folder, "man --out pages");
    for command in &commands {
        assert!(completions.contains(&format!("remesh,{command})")), "{command}");
        let page = std::fs::read_to_string(folder.join(format!("pages/remesh-{command}.1"))).unwrap();
        assert!(page.contains(".SH DESCRIPTION"), "{command}");
    }
    let page = ok(folder, "man data tokenize");
    assert!(page.contains("json\\-key"), "{page}");
    let stderr = refused(folder, "man data stir", 2);
    expect![[r#"
        Error: RM6003

          × there is no command `stir`
          help: there are tokenize
    "#]]
    .assert_eq(&stderr);
    let block: Value = serde_json::from_str(&ok(folder, "env --json")).unwrap();
    assert_eq!(block["schema"], "remesh.env/1");
    assert_eq!(block["version"], env!("CARGO_PKG_VERSION"));
    assert!(block["cores"].as_u64().unwrap() > 0 && block["libraries"].is_array());
}
