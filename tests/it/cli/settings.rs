//! Flags, the configuration file and launch scripts: what is taken, what is refused.

use super::{MODEL, metrics, ok, refused, remesh, text, with_tokens};
use expect_test::expect;
use serde_json::Value;

#[test]
fn a_pasted_launch_script_is_taken_and_what_makes_no_difference_is_named() {
    let folder = with_tokens();
    let folder = folder.path();
    let script = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --group-query-attention \
                  --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 \
                  --global-batch-size 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 \
                  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --train-iters 2 \
                  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 \
                  --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
                  --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 --use-flash-attn \
                  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
                  --use-distributed-optimizer --overlap-grad-reduce --data-path tokens --tokenizer-type NullTokenizer \
                  --vocab-size 257 --split 99,1,0 --save run --load run --save-interval 1 --log-interval 1 --seed 7";
    let output = remesh(folder, &format!("train {script}"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    expect![[r#"
        no effect here: --overlap-grad-reduce, --tokenizer-type NullTokenizer, --use-flash-attn
    "#]]
    .assert_eq(&text(&output.stderr));
    assert_eq!(metrics(folder, "run").len(), 2);

    let said = refused(folder, &format!("train {script} --fp16 --num-experts 8 --squared-relu"), 2);
    expect![[r#"
        Error: RM6005

          × `--squared-relu`: models so far have RMSNorm or LayerNorm, SwiGLU or GELU, plain rotary or learned positions; `--num-experts 8`: there are no experts so far; `--fp16`: the trainer computes in f32 or bf16 so far
          help: leave out --squared-relu --num-experts 8 --fp16
    "#]]
    .assert_eq(&said);
}

/// A launch script of GPT-2, the keys that it makes, and what contradicts itself in one.
#[test]
fn flags_of_gpt2_make_a_gpt2() {
    let folder = with_tokens();
    let folder = folder.path();
    let script = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 \
                  --global-batch-size 4 --train-iters 1 --lr 1e-3 --data-path tokens --save run --normalization LayerNorm \
                  --position-embedding-type learned_absolute --max-position-embeddings 40 --add-bias-linear --tie-embeddings";
    let output = remesh(folder, &format!("train {script} --no-swiglu"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = remesh(folder, "digest --json run");
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let model = shown.as_object().unwrap().iter().filter(|(key, _)| !key.starts_with("optimizer."));
    let listed: Vec<String> = model.map(|(key, of)| format!("{key} {}", of["shape"])).collect();
    expect![[r#"
        decoder.final_layernorm.bias [16]
        decoder.final_layernorm.weight [16]
        decoder.layers.0.mlp.linear_fc1.bias [64]
        decoder.layers.0.mlp.linear_fc1.layer_norm_bias [16]
        decoder.layers.0.mlp.linear_fc1.layer_norm_weight [16]
        decoder.layers.0.mlp.linear_fc1.weight [64,16]
        decoder.layers.0.mlp.linear_fc2.bias [16]
        decoder.layers.0.mlp.linear_fc2.weight [16,64]
        decoder.layers.0.self_attention.linear_proj.bias [16]
        decoder.layers.0.self_attention.linear_proj.weight [16,16]
        decoder.layers.0.self_attention.linear_qkv.bias [48]
        decoder.layers.0.self_attention.linear_qkv.layer_norm_bias [16]
        decoder.layers.0.self_attention.linear_qkv.layer_norm_weight [16]
        decoder.layers.0.self_attention.linear_qkv.weight [48,16]
        embedding.position_embeddings.weight [40,16]
        embedding.word_embeddings.weight [257,16]"#]]
    .assert_eq(&listed.join("\n"));

    let said = refused(folder, &format!("train {script} --swiglu --openai-gelu"), 2);
    expect![[r#"
        Error: RM6003

          × `swiglu` and `openai_gelu` are both set
          help: leave one of them out
    "#]]
    .assert_eq(&said);
    let said = refused(folder, &format!("train {script} --use-rotary-position-embeddings"), 2);
    expect![[r#"
        Error: RM6003

          × `--use-rotary-position-embeddings` and `--position-embedding-type learned_absolute` contradict each other
          help: leave one of them out
    "#]].assert_eq(&said);
}

#[test]
fn settings_come_from_the_file_and_flags_go_over_it() {
    let folder = with_tokens();
    let folder = folder.path();
    let file = "[model]\nnum_layers = 1\nhidden_size = 16\nffn_hidden_size = 16\nnum_attention_heads = 2\n\
                [training]\nseq_length = 32\nmicro_batch_size = 1\nglobal_batch_size = 4\ntrain_iters = 9\nlr = 1e-2\n\
                [data]\ndata_path = \"tokens\"\n[checkpoint]\nsave = \"run\"\n";
    std::fs::write(folder.join("run.toml"), file).unwrap();
    ok(folder, "train --config run.toml --train-samples 8");
    let by_file = metrics(folder, "run");
    assert_eq!(by_file.len(), 2);
    let no_dropout = MODEL.replace("0.1", "0");
    ok(folder, &format!("train {no_dropout} --train-samples 8 --save flags"));
    assert_eq!(metrics(folder, "flags"), by_file);

    std::fs::write(
        folder.join("typo.toml"),
        "[parallelism]\ntensor_model_parallel_size = 2\ncontext_parallel_sizes = 4\n",
    )
    .unwrap();
    expect![[r#"
        Error: RM6002

          × unknown key `context_parallel_sizes` in [parallelism]
           ╭─[typo.toml:3:1]
         2 │ tensor_model_parallel_size = 2
         3 │ context_parallel_sizes = 4
           · ───────────┬──────────
           ·            ╰── not a known key
           ╰────
          help: did you mean `context_parallel_size`?
    "#]]
    .assert_eq(&refused(folder, "train --config typo.toml", 2));
    std::fs::write(folder.join("type.toml"), "[training]\nlr = \"high\"\n").unwrap();
    expect![[r#"
        Error: RM6003

          × invalid type: string "high", expected f64
           ╭─[type.toml:2:6]
         1 │ [training]
         2 │ lr = "high"
           ·      ───┬──
           ·         ╰── here
           ╰────
          help: a value has the type that `remesh train --help` tells for the flag of the same name
    "#]]
    .assert_eq(&refused(folder, "train --config type.toml", 2));
    std::fs::write(folder.join("table.toml"), "[optimizer]\nlr = 1.0\n").unwrap();
    expect![[r#"
        Error: RM6002

          × unknown table or key `optimizer`
           ╭─[table.toml:1:2]
         1 │ [optimizer]
           ·  ────┬────
           ·      ╰── not a known key
         2 │ lr = 1.0
           ╰────
          help: known here: model, parallelism, training, data, checkpoint, logging
    "#]]
    .assert_eq(&refused(folder, "train --config table.toml", 2));
}

/// Whether `value` is one that `schema` describes, as far as the schema of `remesh.toml` has words for it.
fn fits(schema: &Value, value: &Value) -> bool {
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|schema| fits(schema, value));
    }
    if let Some(names) = schema["enum"].as_array() {
        return names.contains(value);
    }
    let number = value.as_i64().map_or(0.0, |number| number as f64);
    let is_within = schema["minimum"].as_f64().is_none_or(|min| number >= min)
        && schema["maximum"].as_f64().is_none_or(|max| number <= max);
    match schema["type"].as_str().unwrap() {
        "object" => value.as_object().is_some_and(|fields| {
            fields
                .iter()
                .all(|(key, value)| schema["properties"].get(key).is_some_and(|schema| fits(schema, value)))
        }),
        "array" => {
            value.as_array().is_some_and(|items| items.iter().all(|item| fits(&schema["items"], item)))
        }
        "integer" => value.is_i64() && is_within,
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        other => panic!("`{other}` is no type"),
    }
}

/// The schema takes the files that the program takes, and refuses what it refuses for its form.
#[test]
fn the_schema_of_the_file_tells_good_ones_from_bad() {
    let folder = with_tokens();
    let folder = folder.path();
    let schema: Value = serde_json::from_str(&ok(folder, "config schema")).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    let takes = |file: &str| {
        let value: Value = toml::from_str(file).unwrap();
        std::fs::write(folder.join("file.toml"), file).unwrap();
        let output = remesh(folder, &format!("config check {MODEL} --train-iters 2 --config file.toml"));
        let said = text(&output.stderr);
        let is_taken = !said.contains("file.toml:");
        assert_eq!(fits(&schema, &value), is_taken, "{file}\n{said}");
        is_taken
    };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/remesh.toml");
    assert!(takes(&std::fs::read_to_string(example).unwrap()));
    // Every setting, as the program writes them.
    let flags = "--train-iters 2 --lr-decay-style WSD --lr-wsd-decay-iters 1 --save run --save-retain-interval 2 --allow-change seed \
                 --rampup-batch-size 2 1 8 --iterations-to-skip 1 --weight-decay-incr-style linear --start-weight-decay 0 \
                 --end-weight-decay 0.1 --eval-interval 2 --valid-data-path 1 tokens 2 tokens --log-dir logs";
    let shown = ok(folder, &format!("config show {MODEL} {flags}"));
    let all: String = shown.lines().map(|line| line.trim_start_matches("# ").to_owned() + "\n").collect();
    let mut settings = 0;
    let value: Value = toml::from_str(&all).unwrap();
    value.as_object().unwrap().values().for_each(|table| settings += table.as_object().unwrap().len());
    assert!(settings > 70, "{settings}");
    assert!(fits(&schema, &value), "{all}");
    for good in [
        "[training]\nglobal_batch_size = 8\nnumerics = \"fast\"",
        "[data]\ndata_path = [\"0.5\", \"a\", \"0.5\", \"b\"]",
        "[model]\nswiglu = false\nnormalization = \"LayerNorm\"",
        "[checkpoint]\nallow_missing = [\"a.*\"]\nmost_recent_k = 1",
        "[parallelism]\nhierarchical_context_parallel_sizes = [1]\nrank_order = \"cp-inside-gtp\"",
    ] {
        assert!(takes(good), "{good}");
    }
    for bad in [
        "[optimizer]\nlr = 1.0",
        "[training]\nlr = \"high\"",
        "[training]\nnum_layers = 2",
        "[model]\nnum_layers = -1",
        "[model]\nswiglu = 1",
        "[parallelism]\ncontext_parallel_size = 4294967296",
        "[parallelism]\ntensor_model_parallel_size = 1.5",
        "[data]\nepoch_tail = \"cut\"",
        "[data]\ndata_path = 7",
        "[checkpoint]\nmost_recent_k = 0",
        "[checkpoint]\nallow_missing = \"a.*\"",
        "[training]\nfp32 = true",
    ] {
        assert!(!takes(bad), "{bad}");
    }
}

#[test]
fn the_example_configuration_trains() {
    let folder = with_tokens();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/remesh.toml");
    let said = ok(folder.path(), &format!("train --config {example} --train-iters 1 --micro-batch-size 4"));
    assert!(said.contains("saved step 1 to "), "{said}");
}

#[test]
fn every_number_of_a_layout_says_where_it_comes_from() {
    let folder = with_tokens();
    let output =
        remesh(folder.path(), &format!("train {MODEL} --train-iters 4 -v --weight-shards 2 --seq-shards 2"));
    let said = text(&output.stderr);
    for line in [
        "tensor-parallel-num-sequence-shards 2 (command line)",
        "runtime CP 2 = configured CP 1 × 2 GTP sequence shards",
        "batch parallel size 1 = DP 1 × 1 GTP batch shards",
    ] {
        assert!(said.lines().any(|said| said == line), "{said}");
    }
}

#[test]
fn layouts_that_cannot_be_are_refused_before_anything_is_written() {
    let folder = with_tokens();
    let folder = folder.path();
    let refused =
        |flags: &str| refused(folder, &format!("train {MODEL} --train-iters 4 --save run {flags}"), 2);
    expect![[r#"
        Error: RM2003

          × TP 4 does not divide the 2 query groups: 2 % 4 != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`)
          help: pick a TP size that divides the query groups: 1, 2
    "#]].assert_eq(&refused("--tp 4"));
    expect![[r#"
        Error: RM2001

          × weight shards 3 ÷ TP 2 is not exact
          help: `--tensor-parallel-num-weight-shards` is a multiple of TP 2
    "#]]
    .assert_eq(&refused("--weight-shards 3 --tp 2"));
    expect![[r#"
        Error: RM2030

          × a leaf of 16 tokens does not divide T/(2·runtime CP) = 32/(2·2) = 8
          help: the largest leaf that fits is --canonical-leaf-tokens 8
    "#]]
    .assert_eq(&refused("--cp 2 --canonical-leaf-tokens 16"));
    expect![[r#"
        Error: RM6003

          × leaves and blocks are set, which fast numerics do not have
          help: leave out --canonical-leaf-tokens and --canonical-tp-leaves, or say --numerics canonical
    "#]]
    .assert_eq(&refused("--numerics fast --canonical-leaf-tokens 8"));
    // Layouts that the rules admit and the trainer does not run.
    for flags in [
        "--nproc-per-node 2 --ep 2",
        "--nproc-per-node 2 --num-distributed-optimizer-instances 2",
        "--cp 4 --hierarchical-context-parallel-sizes 2,2",
    ] {
        let said = refused(flags);
        assert!(said.contains("RM2032") || said.contains("RM6005"), "{flags}: {said}");
    }
    expect![[r#"
        Error: RM2001

          × world size 2 is not a multiple of ETP 1 × EP 3 × EGTP 1 × PP 1 = 3
          help: with the other sizes as they are, one of these would fit: a world size that is a multiple of 3; EP 1 or 2
    "#]]
    .assert_eq(&refused("--nproc-per-node 2 --ep 3"));
    // What flags alone show comes before any file is looked for.
    assert!(refused("--tp 4 --data-path nowhere").contains("RM2003"));
    assert!(refused("--cp 2 --canonical-leaf-tokens 16 --data-path nowhere").contains("RM2030"));
    assert!(!folder.join("run").exists());
}

#[test]
fn settings_that_contradict_the_data_or_each_other_are_refused() {
    let folder = with_tokens();
    let folder = folder.path();
    let refused = |flags: &str| refused(folder, &format!("train {MODEL} --save run {flags}"), 2);
    expect![[r#"
        Error: RM6003

          × `--vocab-size` 100 is less than the 257 ids of the data's tokenizer
          help: leave it out, or give at least that
    "#]]
    .assert_eq(&refused("--train-iters 1 --vocab-size 100"));
    expect![[r#"
        Error: RM6003

          × 3 samples of training, less than a global batch of 4
          help: give more --train-samples, or at least one of --train-iters
    "#]]
    .assert_eq(&refused("--train-samples 3"));
    expect![[r#"
        Error: RM6003

          × `--calculate-per-token-loss` and `--loss-average sample` contradict each other
          help: leave one of them out
    "#]]
    .assert_eq(&refused("--train-iters 1 --loss-average sample --calculate-per-token-loss"));
    expect![[r#"
        Error: RM6005

          × `--dist-ckpt-strictness log_all`: a tensor that the checkpoint lacks is trained from its initial value only if it is named: --allow-missing GLOB; --allow-extra GLOB names what the model does not want
          help: leave out --dist-ckpt-strictness log_all
    "#]]
    .assert_eq(&refused("--train-iters 1 --dist-ckpt-strictness log_all"));
    assert!(!folder.join("run").exists());
}

#[test]
fn flags_of_launch_scripts_mean_what_they_say() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 1");
    std::fs::write(folder.join("sample.toml"), "[training]\nloss_average = \"sample\"\n").unwrap();
    ok(folder, &format!("{line} --config sample.toml --calculate-per-token-loss --save run"));
    let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect run --json")).unwrap();
    assert_eq!(inspected["commit"]["config"]["loss_average"], "token");
    assert!(refused(folder, &format!("{line} --distributed-timeout-minutes 0"), 2).contains("zero"));
    ok(folder, &format!("{line} --distributed-timeout-minutes 30"));
    // The tied model does not want the checkpoint's output layer.
    let tied = format!("{line} --load run --save new --finetune --tie-embeddings --dist-ckpt-strictness");
    assert!(refused(folder, &format!("{tied} raise_all"), 2).contains("`output_layer.weight`"));
    ok(folder, &format!("{tied} assume_ok_unexpected"));
}

#[test]
fn every_setting_is_shown_with_its_origin_and_can_be_fed_back() {
    let folder = with_tokens();
    let folder = folder.path();
    let file = "[training]\nseed = 7\nlr = 5e-3\n[parallelism]\ntensor_model_parallel_size = 2\n";
    std::fs::write(folder.join("run.toml"), file).unwrap();
    let flags = format!("{MODEL} --train-samples 8 --config run.toml");
    let shown = ok(folder, &format!("config show {flags}"));
    for line in [
        "seed = 7  # configuration file",
        "lr = 0.01  # command line",
        "tensor_model_parallel_size = 2  # configuration file",
        "# tensor_parallel_num_weight_shards = 2  # built-in",
        "train_samples = 8  # command line",
        "hidden_dropout = 0.1  # command line",
        "# adam_beta1 = 0.9  # built-in",
        "# vocab_size = 257  # built-in",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "`{line}` is not in\n{shown}");
    }
    assert!(!shown.contains("train_iters"), "{shown}");
    std::fs::write(folder.join("shown.toml"), shown).unwrap();
    ok(folder, "train --config shown.toml --save fed");
    ok(folder, &format!("train {flags} --save said"));
    assert_eq!(metrics(folder, "fed"), metrics(folder, "said"));
    let json: serde_json::Value =
        serde_json::from_str(&ok(folder, &format!("config show --json {flags}"))).unwrap();
    let seed = serde_json::json!({ "value": 7, "origin": "config_file" });
    assert_eq!(json["settings"]["training"]["seed"], seed);
}

#[test]
fn all_that_is_missing_or_wrong_is_said_at_once() {
    let folder = with_tokens();
    let folder = folder.path();
    expect![[r#"
        Error: RM6004

          × `--hidden-size`, `--num-attention-heads`, `--seq-length`, `--micro-batch-size`, `--train-iters`, `--lr`, `--data-path` are not set
          help: give them, or the same names with underscores in the configuration file; `remesh train --help` explains each
    "#]]
    .assert_eq(&refused(folder, "train --num-layers 1 --save run", 2));
    expect![[r#"
        Error: RM6006

          × `--hidden-size`, `--num-attention-heads`, `--seq-length`, `--micro-batch-size`, `--train-iters`, `--lr`, `--data-path` are not set; weight shards 3 ÷ TP 2 is not exact
          help: mend one after the other; `remesh config check` says what is left
    "#]]
    .assert_eq(&refused(folder, "config check --num-layers 1 --tp 2 --weight-shards 3", 2));
    assert!(refused(folder, &format!("config check {MODEL} --train-iters 1 --tp 4"), 2).contains("RM2003"));
    ok(folder, &format!("config check {MODEL} --train-iters 1"));
    let flags = "--train-iters 1 --kv-channels 7 --adam-beta1 2 --lr -1e-2 --clip-grad nan --tp 4 --save-interval 5 \
                 --allow-change sede --eval-interval 0 --data-path nowhere";
    let said = refused(folder, &format!("config check {MODEL} {flags}"), 2);
    for fault in [
        "no setting of that name may change; ",
        "`--save-interval` is set, and `--save` is not",
        "nowhere.idx",
        "`eval-interval` is 0",
        "`kv-channels` is 7, and rotary positions turn channels in pairs",
        "`adam-beta1` is 2",
        "`clip-grad` is NaN",
        "TP 4 does not divide the 2 query groups",
    ] {
        assert!(said.contains(fault), "`{fault}` is not in\n{said}");
    }
}

/// Of two that contradict each other neither is taken in silence.
#[test]
fn what_is_said_twice_in_opposite_ways_is_refused_with_both() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::write(folder.join("a.toml"), "[training]\nseed = 7\n").unwrap();
    std::fs::write(folder.join("b.toml"), "[training]\nlr = 1.0\n").unwrap();
    let line = format!("train {MODEL} --train-iters 1");
    for (flags, one, other) in [
        ("--bf16 --fp32", "--bf16", "--fp32"),
        ("--no-swiglu --swiglu", "--no-swiglu", "--swiglu"),
        ("--sp --no-sequence-parallel", "--sequence-parallel", "--no-sequence-parallel"),
        ("--add-bias-linear --disable-bias-linear", "--add-bias-linear", "--disable-bias-linear"),
        ("--tie-embeddings --untie-embeddings-and-output-weights", "--tie-embeddings", "--untie-embeddings"),
        ("--config a.toml --config b.toml", "`--config a.toml`", "`--config b.toml`"),
        (
            "--weight-decay 0.1 --weight-decay-incr-style linear",
            "`weight_decay`",
            "`weight_decay_incr_style`",
        ),
        ("--end-weight-decay 0.1", "`end_weight_decay`", "the weight decay does not rise"),
    ] {
        let said = refused(folder, &format!("{line} {flags}"), 2);
        assert!(said.contains(one) && said.contains(other), "{flags}: {said}");
    }
    // Said twice alike, or the last of several numbers, as launch scripts do.
    ok(folder, &format!("{line} --fp32 --fp32 --seed 1 --seed 2"));
}

/// A flag goes over the file, whichever of the two ways to say it either has.
#[test]
fn a_weight_decay_of_one_kind_goes_over_one_of_the_other() {
    let folder = with_tokens();
    let folder = folder.path();
    let rises = "[training]\nweight_decay_incr_style = \"linear\"\nstart_weight_decay = 0.1\nend_weight_decay = 0.2\n";
    std::fs::write(folder.join("rises.toml"), rises).unwrap();
    std::fs::write(folder.join("stays.toml"), "[training]\nweight_decay = 0.3\n").unwrap();
    let schedule = |flags: &str| {
        ok(folder, &format!("train {MODEL} --train-iters 1 --save run {flags}"));
        let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect run --json")).unwrap();
        std::fs::remove_dir_all(folder.join("run")).unwrap();
        let schedule = inspected["commit"]["config"]["schedule"].clone();
        ["start_weight_decay", "end_weight_decay", "weight_decay_style"]
            .map(|name| schedule[name].to_string())
    };
    assert_eq!(schedule("--config rises.toml"), ["0.1", "0.2", "\"linear\""]);
    assert_eq!(schedule("--config rises.toml --weight-decay 0"), ["0.0", "0.0", "\"constant\""]);
    let flags = "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.02";
    assert_eq!(schedule(&format!("--config stays.toml {flags}")), ["0.01", "0.02", "\"cosine\""]);
    let said = refused(folder, &format!("train {MODEL} --train-iters 1 --weight-decay-incr-style linear"), 2);
    assert!(said.contains("`--start-weight-decay` is not set"), "{said}");
}

/// Model, training and data order come from the checkpoint; the layout from flags, as ever.
#[test]
fn settings_that_nobody_says_come_from_the_checkpoint_if_asked_for() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --seed 7 --train-iters 4 --save straight"));
    ok(folder, &format!("train {MODEL} --seed 7 --train-iters 2 --lr-decay-iters 4 --save run"));
    let flags = "--use-checkpoint-args --data-path tokens --train-iters 4 --save run --tp 2";
    let shown = ok(folder, &format!("config show {flags}"));
    for line in [
        "seed = 7  # checkpoint",
        "lr_decay_samples = 16  # checkpoint",
        "train_iters = 4  # command line",
        "tensor_model_parallel_size = 2  # command line",
        "# context_parallel_size = 1  # built-in",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "`{line}` is not in\n{shown}");
    }
    ok(folder, &format!("train {flags}"));
    assert_eq!(metrics(folder, "run"), metrics(folder, "straight"));
}

#[test]
fn numbers_that_cannot_be_are_refused_with_what_can() {
    let folder = with_tokens();
    let folder = folder.path();
    let refused =
        |flags: &str| refused(folder, &format!("train {MODEL} --train-iters 1 --save run {flags}"), 2);
    expect![[r#"
        Error: RM6003

          × `adam-eps` is 0
          help: give `adam-eps` a finite number above 0, from 1.2e-38 on
    "#]]
    .assert_eq(&refused("--adam-eps 0"));
    expect![[r#"
        Error: RM6003

          × `adam-beta1` is -0.5
          help: give `adam-beta1` a number from 0 up to, not including, 1
    "#]]
    .assert_eq(&refused("--adam-beta1 -0.5"));
    expect![[r#"
        Error: RM6010

          × learning rates must be 0 ≤ min 0 ≤ max -0.01 and 0 ≤ init 0 ≤ max -0.01
          help: check `--lr`, `--min-lr` and `--lr-warmup-init`: finite, at least 0
    "#]]
    .assert_eq(&refused("--lr -1e-2"));
    assert!(refused("--clip-grad nan").contains("`clip-grad` is NaN"));
    assert!(refused("--tp -1").contains("invalid value '-1' for '--tensor-model-parallel-size"));
    assert!(refused("--num-query-groups 0").contains("`num-query-groups` is 0"));
    assert!(
        refused("--micro-batch-size 0").ends_with("help: give `--micro-batch-size` a value of at least 1\n")
    );
    let said = refused("--kv-channels 7");
    assert!(said.contains("`kv-channels` is 7, and rotary positions turn channels in pairs"), "{said}");
    let said = refused("--rampup-batch-size 2 1 8 --epoch-tail drop");
    assert!(said.contains("which grow here: 2 to 4 by 1 over 8 samples\n"), "{said}");
    expect![[r#"
        Error: RM6003

          × `--allow-change sede`: no setting of that name may change
          help: these may: norm-epsilon, rotary-base, hidden-dropout, attention-dropout, seq-length, global-batch-size, seed, data, epoch-tail, documents, iterations-to-skip, loss-average, optimizer, numerics
    "#]]
    .assert_eq(&refused("--allow-change seed,sede"));
    assert!(!folder.join("run").exists());
}

/// Each of these would end the process if it were tried.
#[test]
fn what_cannot_fit_the_memory_is_refused_before_it_is_asked_for() {
    let folder = with_tokens();
    let folder = folder.path();
    for flags in [
        "--vocab-size 100000000000",
        "--hidden-size 1099511627776",
        "--num-layers 1000000000000",
        "--nproc-per-node 1000000 --global-batch-size 1000000",
        "--global-batch-size 1000000000000",
        "--hidden-size 9223372036854775808 --kv-channels 9223372036854775808",
    ] {
        let train = "--train-iters 1 --save run --hidden-dropout 0 --attention-dropout 0";
        let said = refused(folder, &format!("train {MODEL} {train} {flags}"), 8);
        assert!(said.starts_with("Error: RM2050\n\n  × this run needs at least "), "{flags}: {said}");
        assert!(!said.contains(&u64::MAX.to_string()), "a size that cannot be counted is no number: {said}");
    }
    assert!(!folder.join("run").exists());
}

#[test]
fn flags_may_be_written_with_underscores() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!(
        "train {MODEL} --train_iters=1 --micro_batch_size 2 --nproc_per_node 2 --save run_1 --override-opt_param-scheduler"
    );
    ok(folder, &line);
    let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect run_1 --json")).unwrap();
    assert_eq!(inspected["commit"]["config"]["parallel"]["micro_batch_size"], 2);
    assert_eq!(inspected["commit"]["layout"]["world_size"], 2);
    // Megatron's own spelling, of which half has underscores.
    ok(folder, &format!("train {MODEL} --train-iters 2 --load run_1 --use-checkpoint-opt_param-scheduler"));
}

#[test]
fn positions_without_a_table_are_no_learned_ones() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 1 --no-position-embedding");
    let said = refused(folder, &format!("{line} --position-embedding-type learned_absolute"), 2);
    assert!(said.contains("RM6003") && said.contains("`--no-position-embedding` and "), "{said}");
    ok(folder, &format!("{line} --position-embedding-type rope"));
}

/// Files and flags have one list of names, and the help and a refusal tell it.
#[test]
fn values_that_are_names_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let help = ok(folder, "train --help");
    for line in [
        "[possible values: RMSNorm, LayerNorm]",
        "[possible values: rope, learned_absolute]",
        "[possible values: constant, linear, cosine, inverse-square-root, WSD]",
        "[possible values: linear, cosine, exponential, minus_sqrt]",
        "[possible values: span, drop, pad]",
        "--swiglu[=<BOOL>]",
        "--no-swiglu",
    ] {
        assert!(help.contains(line), "`{line}` is not in\n{help}");
    }
    let said = refused(folder, "train --epoch-tail cut", 2);
    assert!(said.contains("invalid value 'cut' for '--epoch-tail <RULE>'"), "{said}");
    assert!(said.contains("[possible values: span, drop, pad]"), "{said}");
    std::fs::write(folder.join("run.toml"), "[data]\nepoch_tail = \"cut\"\n").unwrap();
    let said = refused(folder, "train --config run.toml", 2);
    assert!(said.contains("unknown variant `cut`, expected one of `span`, `drop`, `pad`"), "{said}");
}

#[test]
fn all_unknown_flags_are_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let stderr = refused(folder.path(), "config check --no-such 3 --num-layers 2 --nor-that=5 --or this", 2);
    assert!(stderr.starts_with("error: these flags are not known: --no-such --nor-that --or\n"), "{stderr}");
}

#[test]
fn a_script_of_megatrons_is_told_which_defaults_it_does_not_get() {
    let folder = with_tokens();
    let train = |flags: &str| {
        let output = remesh(folder.path(), &format!("config check {MODEL} --train-iters 1 {flags}"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    assert_eq!(train(""), "");
    let said =
        train("--use-mcore-models --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights");
    assert!(
        said.ends_with(
            "not as by Megatron's defaults, which are --position-embedding-type learned_absolute --add-bias-linear \
             --lr-decay-style linear\n"
        ),
        "{said}"
    );
}

/// The file says what was said and no more: flags go over it, and every way to say a batch comes back.
#[test]
fn a_shown_configuration_can_be_changed_by_flags() {
    let folder = with_tokens();
    let folder = folder.path();
    let model = MODEL.replace("--global-batch-size 4", "");
    for batch in ["--step-batch-size-schedule 0:4", "--global-batch-size 8 --rampup-batch-size 4 4 8"] {
        let shown = ok(folder, &format!("config show {model} {batch} --train-iters 2"));
        std::fs::write(folder.join("shown.toml"), shown).unwrap();
        ok(folder, "config check --config shown.toml");
        ok(folder, "config check --config shown.toml --tp 2 --train-iters 9");
    }
    let stderr = refused(folder, &format!("config check {MODEL} --train-iters 2 --data-path nowhere"), 3);
    assert!(stderr.contains("nowhere.idx"), "{stderr}");
}

#[test]
fn more_positions_than_memory_are_refused() {
    let folder = with_tokens();
    for positions in ["4294967295", "9223372036854775807", "18446744073709551615"] {
        let learned =
            format!("--position-embedding-type learned_absolute --max-position-embeddings {positions}");
        let stderr = refused(folder.path(), &format!("train {MODEL} --train-iters 1 {learned}"), 8);
        assert!(stderr.contains("RM2050"), "{stderr}");
    }
}
