//! The JSON Schema of `remesh.toml`, from the declarations of the settings: an editor completes and checks what is written.

use super::LoggingArgs;
use super::checkpoint::CheckpointArgs;
use super::data::DataArgs;
use super::file::BATCH_KEYS;
use super::model::ModelArgs;
use super::training::TrainingArgs;
use clap::{Arg, ArgAction, Args, Command};
use mesh::ParallelArgs;
use serde_json::{Map, Value, json};
use std::any::TypeId;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;

/// The schema of the whole file.
pub(crate) fn schema() -> Value {
    let parallelism = table::<ParallelArgs>();
    let mut training = table::<TrainingArgs>();
    training.extend(BATCH_KEYS.map(|key| (key.to_owned(), parallelism[key].clone())));
    let tables = [
        ("model", table::<ModelArgs>()),
        ("parallelism", parallelism),
        ("training", training),
        ("data", table::<DataArgs>()),
        ("checkpoint", table::<CheckpointArgs>()),
        ("logging", table::<LoggingArgs>()),
    ];
    let tables = tables.map(|(name, properties)| (name.to_owned(), object(properties)));
    let Value::Object(mut schema) = object(Map::from_iter(tables)) else { unreachable!("it is made as one") };
    schema.insert("$schema".to_owned(), "https://json-schema.org/draft/2020-12/schema".into());
    schema.insert("title".to_owned(), "remesh.toml".into());
    schema.into()
}

fn object(properties: Map<String, Value>) -> Value {
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}

/// The keys of a table, as its flags declare them.
fn table<T: Args>() -> Map<String, Value> {
    let flags = T::augment_args(Command::new(""));
    // A flag that takes no value says the opposite of another one, which is the key.
    let keys = flags.get_arguments().filter(|arg| arg.get_action().takes_values());
    keys.map(|arg| (arg.get_id().to_string(), key(arg))).collect()
}

fn key(arg: &Arg) -> Value {
    let one = value(arg);
    let many = json!({ "type": "array", "items": one });
    let mut key = match arg.get_action() {
        // Words that are given without commas may be one word.
        ArgAction::Append if is::<String>(arg) && arg.get_value_delimiter().is_none() => {
            json!({ "anyOf": [one, many] })
        }
        ArgAction::Append => many,
        _ => one,
    };
    let help = arg.get_help().map(ToString::to_string);
    key["description"] = help.unwrap_or_default().into();
    key
}

fn is<T: 'static>(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<T>()
}

fn value(arg: &Arg) -> Value {
    let names: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    match () {
        () if is::<bool>(arg) => json!({ "type": "boolean" }),
        () if !names.is_empty() => json!({ "enum": names }),
        () if is::<u32>(arg) => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        () if is::<NonZeroU32>(arg) => json!({ "type": "integer", "minimum": 1, "maximum": u32::MAX }),
        () if is::<u64>(arg) || is::<usize>(arg) => json!({ "type": "integer", "minimum": 0 }),
        () if is::<NonZeroU64>(arg) => json!({ "type": "integer", "minimum": 1 }),
        () if is::<f64>(arg) || is::<f32>(arg) => json!({ "type": "number" }),
        () if is::<String>(arg) || is::<PathBuf>(arg) => json!({ "type": "string" }),
        () => unreachable!("`{}` has a type that the schema does not know", arg.get_id()),
    }
}
