//! What flags have in common: switches, and values that are one of several names.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction};
use serde::de::{DeserializeOwned, Deserializer, Error, Visitor, value};
use serde::forward_to_deserialize_any;
use std::any::TypeId;

/// Makes a setting that is true or false a switch: `--name` is `--name=true`.
pub(super) fn switch(arg: Arg) -> Arg {
    let is_bool = arg.get_value_parser().type_id() == TypeId::of::<bool>();
    match is_bool && arg.get_action().takes_values() && arg.get_num_args().is_none() {
        true => arg.num_args(0..=1).require_equals(true).default_missing_value("true").value_name("BOOL"),
        false => arg,
    }
}

/// The flag `name`, which says that the switch `of` is off; both together are refused. That switch has to name it in
/// `default_value_if` and `conflicts_with`.
pub(super) fn contrary(name: &'static str, of: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).help(help).action(ArgAction::SetTrue).conflicts_with(of)
}

/// The parser of an enum's values, by the names that files have for them.
pub(super) fn named<T>() -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    let mut names: &[&str] = &[];
    // It ends with an error, as it must: there is no value yet.
    let _ = T::deserialize(Names(&mut names));
    let value = |name: String| serde_json::from_value(name.into()).expect("it is one of the names");
    PossibleValuesParser::new(names).map(value)
}

/// Asks an enum for the names of its variants.
struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = value::Error;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, value::Error> {
        *self.0 = variants;
        Err(Error::custom("there is no value"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, value::Error> {
        Err(Error::custom("only enums have names"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}
