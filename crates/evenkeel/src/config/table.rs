//! The macro behind the table of keys, and its view for `--explain`.

use toml::Value;

use super::setting::{Bounds, Setting, SettingKind};

/// One `[section]` of the file.
pub struct Section {
    pub name: &'static str,
    pub meaning: String,
    pub keys: Vec<Key>,
}

pub struct Key {
    pub name: &'static str,
    pub meaning: String,
    pub kind: SettingKind,
    pub unless_given: UnlessGiven,
}

/// A key's value if the file does not have it.
#[derive(Debug, PartialEq)]
pub enum UnlessGiven {
    Default(Value),
    /// Left to the code that reads it; the key's meaning says what happens.
    Unset,
    Required,
}

/// The source of values for [`Settings::read`](super::Settings::read).
pub trait Source {
    /// The value of a key, or the default; else it notes the problem and returns a placeholder.
    fn take<T: Setting>(&mut self, section: &'static str, key: &'static str, default: Option<T>, bounds: Bounds) -> T;
}

impl Key {
    pub fn new<T: Setting>(name: &'static str, doc: &str, default: Option<T>, bounds: Bounds) -> Key {
        let unless_given = match default.or_else(T::absent).map(|value| value.write()) {
            None => UnlessGiven::Required,
            Some(None) => UnlessGiven::Unset,
            Some(Some(value)) => UnlessGiven::Default(value),
        };
        Key { name, meaning: doc.trim().to_owned(), kind: T::kind(bounds), unless_given }
    }
}

/// Writes a struct for each section and [`Settings`](super::Settings) of them all. A line is
/// `/// meaning` and `key: type = default, bounds;`; without a default an `Option` may be left out and the rest is
/// required.
macro_rules! settings {
    ($(
        $(#[doc = $section_doc:literal])+
        [$section:ident] $struct:ident {
            $($(#[doc = $doc:literal])+ $key:ident: $type:ty $(= $default:expr)? $(, $bounds:expr)?;)+
        }
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $struct { $($(#[doc = $doc])+ pub $key: $type,)+ }
        )+

        /// Every key of a configuration, each of its type and within its bounds.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Settings { $($(#[doc = $section_doc])+ pub $section: $struct,)+ }

        impl Settings {
            pub fn sections() -> Vec<$crate::config::table::Section> {
                use $crate::config::table::{Key, Section};
                vec![$(Section {
                    name: stringify!($section),
                    meaning: concat!($($section_doc),+).trim().to_owned(),
                    keys: vec![$(Key::new::<$type>(
                        stringify!($key),
                        concat!($($doc),+),
                        settings!(@default $($default)?),
                        settings!(@bounds $($bounds)?),
                    )),+],
                }),+]
            }

            pub fn read(source: &mut impl $crate::config::table::Source) -> Settings {
                Settings {$($section: $struct {$(
                    $key: source.take::<$type>(
                        stringify!($section),
                        stringify!($key),
                        settings!(@default $($default)?),
                        settings!(@bounds $($bounds)?),
                    ),
                )+},)+}
            }

            /// The keys that are set, by section.
            pub fn values(&self) -> Vec<(&'static str, Vec<(&'static str, toml::Value)>)> {
                use $crate::config::setting::Setting;
                let set = |key, value: Option<toml::Value>| value.map(|value| (key, value));
                vec![$((
                    stringify!($section),
                    [$(set(stringify!($key), self.$section.$key.write())),+].into_iter().flatten().collect(),
                )),+]
            }
        }
    };
    (@default) => { None };
    (@default $default:expr) => { Some($default) };
    (@bounds) => { $crate::config::setting::anything() };
    (@bounds $bounds:expr) => { $bounds };
}

pub(super) use settings;
