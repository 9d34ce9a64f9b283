//! Settings that several layers may say, and the one rule of which counts: explicit over file over checkpoint over program
//! default over built-in.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Who said a value, the strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A flag.
    CommandLine,
    /// The configuration file.
    ConfigFile,
    /// The arguments saved in a checkpoint.
    Checkpoint,
    /// The program that runs.
    ProgramDefault,
    /// Nobody: a built-in default, or what follows from other values.
    BuiltIn,
}

/// Layers of one table of settings merged into one, with the source of each value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged<T> {
    args: T,
    /// By the names of the fields.
    sources: BTreeMap<&'static str, Source>,
}

impl<T> Merged<T> {
    /// What [`merge_layers`](crate::merge_layers) found.
    pub fn new(args: T, sources: BTreeMap<&'static str, Source>) -> Self {
        Merged { args, sources }
    }

    /// The values, whoever said them.
    pub fn args(&self) -> &T {
        &self.args
    }

    /// Who said the value of this field; `None` if nobody did.
    pub fn source(&self, field: &str) -> Option<Source> {
        self.sources.get(field).copied()
    }
}

/// Merges `layers`, a slice of pairs of a [`Source`] and the table `$args`, in any order, into a [`Merged`]: each of the
/// fields, which are `Option`s, comes from the strongest source that says it.
#[macro_export]
macro_rules! merge_layers {
    ($args:ident, $layers:expr, $($field:ident)*) => {{
        let mut layers: Vec<&($crate::Source, $args)> = $layers.iter().collect();
        layers.sort_by_key(|(source, _)| *source);
        let mut args = $args::default();
        let mut sources = std::collections::BTreeMap::new();
        $(
            let strongest = layers.iter().find_map(|(source, args)| args.$field.clone().map(|value| (*source, value)));
            if let Some((source, value)) = strongest {
                args.$field = Some(value);
                sources.insert(stringify!($field), source);
            }
        )*
        $crate::Merged::new(args, sources)
    }};
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Source::CommandLine => "command line",
            Source::ConfigFile => "configuration file",
            Source::Checkpoint => "checkpoint",
            Source::ProgramDefault => "program default",
            Source::BuiltIn => "built-in",
        })
    }
}
