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

/// A setting, or a table of them, that several layers may say. [`settings!`](crate::settings) declares one.
pub trait Layered {
    /// Takes over what `weaker` says and this does not; `taken` is told the name of each setting that was. A setting's own
    /// name is `name`.
    fn fill(&mut self, name: &'static str, weaker: &Self, taken: &mut dyn FnMut(&'static str));
}

impl<T: Clone> Layered for Option<T> {
    fn fill(&mut self, name: &'static str, weaker: &Self, taken: &mut dyn FnMut(&'static str)) {
        if self.is_none() && weaker.is_some() {
            self.clone_from(weaker);
            taken(name);
        }
    }
}

/// Declares a struct of settings, each an `Option`, or of such structs: layers of it can be [`Merged`].
#[macro_export]
macro_rules! settings {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field_visibility:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        $visibility struct $name {
            $($(#[$field_meta])* $field_visibility $field: $type,)*
        }

        impl $crate::Layered for $name {
            fn fill(&mut self, _: &'static str, weaker: &Self, taken: &mut dyn FnMut(&'static str)) {
                $($crate::Layered::fill(&mut self.$field, stringify!($field), &weaker.$field, taken);)*
            }
        }
    };
}

/// Layers of settings merged into one, with the source of each value. Names of settings are unique over all tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged<T> {
    args: T,
    /// By the names of the fields.
    sources: BTreeMap<&'static str, Source>,
}

impl<T: Layered + Default> Merged<T> {
    /// Each value of `layers`, which are in any order, from the strongest source that says it.
    pub fn of(layers: &[(Source, T)]) -> Self {
        let mut layers: Vec<&(Source, T)> = layers.iter().collect();
        layers.sort_by_key(|(source, _)| *source);
        let mut merged = Merged::default();
        layers.into_iter().for_each(|(source, args)| merged.fill(*source, args));
        merged
    }

    /// Adds a layer that is weaker than all before it.
    pub fn fill(&mut self, source: Source, weaker: &T) {
        let sources = &mut self.sources;
        self.args.fill("", weaker, &mut |name| _ = sources.insert(name, source));
    }
}

impl<T> Merged<T> {
    /// The values, whoever said them.
    pub fn args(&self) -> &T {
        &self.args
    }

    /// Who said the value of this field; `None` if nobody did.
    pub fn source(&self, field: &str) -> Option<Source> {
        self.sources.get(field).copied()
    }

    /// One of the tables.
    pub fn table<U: Clone>(&self, table: impl Fn(&T) -> &U) -> Merged<U> {
        Merged { args: table(&self.args).clone(), sources: self.sources.clone() }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    crate::settings! {
        #[derive(Clone, Debug, Default, PartialEq)]
        struct Engine {
            cylinders: Option<u32>,
            fuel: Option<&'static str>,
        }
    }

    crate::settings! {
        #[derive(Clone, Debug, Default, PartialEq)]
        struct Car {
            engine: Engine,
            doors: Option<u32>,
        }
    }

    /// A stronger layer that says one setting of a table leaves the others of it to weaker ones.
    #[test]
    fn tables_are_merged_setting_by_setting() {
        let flags = Car { engine: Engine { cylinders: Some(6), fuel: None }, doors: None };
        let file = Car { engine: Engine { cylinders: Some(4), fuel: Some("diesel") }, doors: None };
        let mut merged = Merged::of(&[(Source::ConfigFile, file), (Source::CommandLine, flags)]);
        merged.fill(Source::BuiltIn, &Car { doors: Some(5), ..Car::default() });
        let engine = Engine { cylinders: Some(6), fuel: Some("diesel") };
        assert_eq!(*merged.args(), Car { engine: engine.clone(), doors: Some(5) });
        let sources = ["cylinders", "fuel", "doors", "wheels"].map(|name| merged.source(name));
        let expected = [Source::CommandLine, Source::ConfigFile, Source::BuiltIn];
        assert_eq!(sources, [Some(expected[0]), Some(expected[1]), Some(expected[2]), None]);
        let of_engine = merged.table(|car| &car.engine);
        assert_eq!((of_engine.args(), of_engine.source("fuel")), (&engine, Some(Source::ConfigFile)));
    }
}
