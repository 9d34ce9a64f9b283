//! Tables of Hugging Face's tensors and ours, both ways.

use expect_test::expect;
use mesh::Shape;
use reshard::{HfModel, TensorMap};
use serde_json::{Value, json};

fn tensor(model: &HfModel, key: &str) -> TensorMap {
    model.tensors().into_iter().find(|map| map.ours.as_str() == key).unwrap()
}

/// Four heads of one element in two groups.
#[test]
fn queries_keys_and_values_stand_together_by_group() {
    let config = json!({
        "model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9, "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6,
    });
    let model = HfModel::of_config(&config).unwrap();
    let map = tensor(&model, "decoder.layers.0.self_attention.linear_qkv.bias");
    let theirs = [vec![0, 1, 2, 3], vec![10, 11], vec![20, 21]];
    let ours = map.to_ours(&theirs);
    assert_eq!(ours, [0, 1, 10, 20, 2, 3, 11, 21]);
    assert_eq!(map.to_theirs(&ours), theirs);
}

/// `c_attn` is `[h, 3h]`: its columns are queries, then keys, then values.
#[test]
fn weights_of_gpt2_are_transposed() {
    let config = json!({
        "model_type": "gpt2", "n_layer": 1, "n_embd": 2, "n_head": 2, "vocab_size": 9, "n_positions": 8,
    });
    let model = HfModel::of_config(&config).unwrap();
    let map = tensor(&model, "decoder.layers.0.self_attention.linear_qkv.weight");
    assert_eq!(map.theirs, [("transformer.h.0.attn.c_attn.weight".to_owned(), Shape::new(&[2, 6]))]);
    let theirs = vec![vec![0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]];
    let ours = map.to_ours(&theirs);
    assert_eq!(ours, [0, 10, 2, 12, 4, 14, 1, 11, 3, 13, 5, 15]);
    assert_eq!(map.to_theirs(&ours), theirs);
    let positions = tensor(&model, "embedding.position_embeddings.weight");
    assert_eq!(positions.theirs[0].1, Shape::new(&[8, 2]));
}

#[test]
fn what_would_change_numbers_is_refused() {
    let refused = |edit: &dyn Fn(&mut Value)| {
        let mut config = json!({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 3,
            "num_attention_heads": 4, "vocab_size": 9, "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
        });
        assert!(HfModel::of_config(&config).is_ok());
        edit(&mut config);
        HfModel::of_config(&config).unwrap_err().to_string()
    };
    let said = [
        refused(&|config| config["model_type"] = json!("mixtral")),
        refused(&|config| config["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 1e4})),
        refused(&|config| config["rope_scaling"] = json!({"type": "linear", "factor": 2.0})),
        refused(&|config| config["hidden_act"] = json!("relu")),
        refused(&|config| config["attention_bias"] = json!(true)),
        refused(&|config| config["num_key_value_heads"] = json!(3)),
        refused(&|config| config["vocab_size"] = json!("nine")),
        refused(&|config| config["hidden_size"] = Value::Null),
        refused(&|config| config["vocab_size"] = json!(0)),
    ];
    expect![[r#"
        `model_type` of config.json is mixtral, which is not known here; known: llama, qwen2, gpt2
        `rope_type` of config.json is "yarn", which is not known here; known: default
        `rope_type` of config.json is "linear", which is not known here; known: default
        `hidden_act` of config.json is relu, which is not known here; known: silu
        `mlp_bias` of config.json is false and `attention_bias` true, which is not known here; known: both or neither
        config.json: 4 query heads in 3 groups, hidden size 4, are no model
        `vocab_size` of config.json is "nine", which is not of its type
        config.json has no `hidden_size`
        config.json: no model has a vocabulary of 0"#]]
    .assert_eq(&said.join("\n"));
}
