//! The map, `ARCHITECTURE.md`, is checked: which crate may name which, where unsafe code may stand, that every file it names is
//! there, and that no source file is missing on it.

use expect_test::expect;
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// What a crate of this workspace may name.
struct Room {
    name: &'static str,
    /// Crates of this workspace.
    ours: &'static [&'static str],
    others: Others,
}

enum Others {
    /// These alone, and what only tests use.
    Only(&'static [&'static str]),
    /// All but these and their families (`arrow` stands for `arrow-array`, too).
    Not(&'static [&'static str]),
    Any,
}

const ROOMS: [Room; 5] = [
    Room {
        name: "mesh",
        ours: &[],
        others: Others::Only(&["clap", "libm", "serde", "serde_json", "smallvec", "thiserror"]),
    },
    Room {
        name: "ckpt",
        ours: &["mesh"],
        others: Others::Not(&["cudarc", "arrow-flight", "clap", "anyhow", "indicatif", "tracing-subscriber"]),
    },
    Room {
        name: "train",
        ours: &["ckpt", "mesh"],
        others: Others::Not(&[
            "object_store",
            "tokio",
            "arrow",
            "clap",
            "anyhow",
            "indicatif",
            "tracing-subscriber",
        ]),
    },
    Room {
        name: "reshard",
        ours: &["ckpt", "mesh"],
        others: Others::Not(&["cudarc", "object_store", "clap", "anyhow", "indicatif", "tracing-subscriber"]),
    },
    Room { name: "remesh", ours: &["mesh", "ckpt", "train", "reshard"], others: Others::Any },
];

/// Files, and folders of the same name, that may hold unsafe code.
const UNSAFE_ROOMS: [&str; 4] =
    ["ckpt/src/local", "train/src/backend/cpu/gemm", "train/src/backend/cuda", "train/src/comm/nccl"];

/// A dependency as a manifest names it.
struct Dependency<'a> {
    name: &'a str,
    fields: &'a Value,
    only_for_tests: bool,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read_manifest(folder: &str) -> Table {
    let path = root().join(folder).join("Cargo.toml");
    fs::read_to_string(path).unwrap().parse().unwrap()
}

/// The manifests of the root package and of all members.
fn manifests() -> Vec<Table> {
    let root = read_manifest(".");
    let members = root["workspace"]["members"].as_array().unwrap().clone();
    let members = members.iter().map(|member| read_manifest(member.as_str().unwrap()));
    members.chain([root.clone()]).collect()
}

fn name(manifest: &Table) -> &str {
    manifest["package"]["name"].as_str().unwrap()
}

fn dependencies(manifest: &Table) -> Vec<Dependency<'_>> {
    let for_targets = manifest.get("target").and_then(Value::as_table);
    let places = [manifest]
        .into_iter()
        .chain(for_targets.into_iter().flat_map(Table::values).filter_map(Value::as_table));
    let mut found = Vec::new();
    for place in places {
        for (section, only_for_tests) in
            [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)]
        {
            let Some(section) = place.get(section).and_then(Value::as_table) else { continue };
            found.extend(section.iter().map(|(key, fields)| Dependency {
                name: fields.get("package").and_then(Value::as_str).unwrap_or(key),
                fields,
                only_for_tests,
            }));
        }
    }
    found
}

fn is_of_family(name: &str, family: &str) -> bool {
    name.strip_prefix(family).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_']))
}

/// Every edge that the map does not have.
fn wrong_edges(manifests: &[Table]) -> Vec<String> {
    let mut wrong = Vec::new();
    for manifest in manifests {
        let from = name(manifest);
        let Some(room) = ROOMS.iter().find(|room| room.name == from) else {
            wrong.push(format!("`{from}` is not on the map"));
            continue;
        };
        for dependency in dependencies(manifest) {
            let to = dependency.name;
            let is_ours = ROOMS.iter().any(|room| room.name == to);
            let is_allowed = match &room.others {
                // A crate names itself to turn on a feature for its tests.
                _ if is_ours => to == from || room.ours.contains(&to),
                Others::Only(names) => dependency.only_for_tests || names.contains(&to),
                Others::Not(families) => !families.iter().any(|family| is_of_family(to, family)),
                Others::Any => true,
            };
            if !is_allowed {
                wrong.push(format!("`{from}` must not name `{to}`"));
            }
            let features = dependency.fields.get("features").and_then(Value::as_array);
            let turns_on_clap =
                features.into_iter().flatten().any(|feature| feature.as_str() == Some("clap"));
            if to == "mesh" && from != "remesh" && turns_on_clap {
                wrong.push(format!("`{from}` must not turn on the feature `clap` of `mesh`"));
            }
            let is_optional = dependency.fields.get("optional").and_then(Value::as_bool) == Some(true);
            if from == "mesh" && to == "clap" && !is_optional {
                wrong.push("`mesh` may name `clap` only as an optional dependency".to_owned());
            }
        }
    }
    wrong
}

#[test]
fn crates_name_only_what_the_map_lets_them() {
    assert_eq!(wrong_edges(&manifests()), Vec::<String>::new());
}

#[test]
fn every_kind_of_wrong_edge_is_found() {
    let with = |package: &str, rest: &str| {
        format!("[package]\nname = \"{package}\"\n{rest}").parse::<Table>().unwrap()
    };
    let wrong = wrong_edges(&[
        with("mesh", "[dependencies]\nckpt = {}\ntokio = {}\nclap = {}\n[dev-dependencies]\nproptest = {}"),
        with(
            "ckpt",
            "[dependencies]\nmesh = { features = [\"clap\"] }\nshown = { package = \"arrow-flight\" }",
        ),
        with("train", "[dependencies]\narrow-array = {}\n[dev-dependencies]\nreshard = {}"),
        with("reshard", "[target.'cfg(unix)'.dependencies]\nobject_store = {}"),
        with("elsewhere", ""),
    ]);
    expect![[r#"
        `mesh` must not name `ckpt`
        `mesh` may name `clap` only as an optional dependency
        `mesh` must not name `tokio`
        `ckpt` must not turn on the feature `clap` of `mesh`
        `ckpt` must not name `arrow-flight`
        `train` must not name `arrow-array`
        `train` must not name `reshard`
        `reshard` must not name `object_store`
        `elsewhere` is not on the map"#]]
    .assert_eq(&wrong.join("\n"));
}

/// The compiler refuses unsafe code wherever the lint is not lifted, if every crate takes the workspace's lints.
#[test]
fn unsafe_code_stands_where_the_map_has_room_for_it() {
    let manifests = manifests();
    let lint = "unsafe_code";
    assert_eq!(manifests.last().unwrap()["workspace"]["lints"]["rust"][lint].as_str(), Some("deny"));
    for manifest in &manifests {
        let inherits = manifest.get("lints").and_then(|lints| lints.get("workspace")?.as_bool());
        assert_eq!(inherits, Some(true), "`{}` does not take the workspace's lints", name(manifest));
    }
    let mut lifted = Vec::new();
    for member in ["mesh", "ckpt", "train", "reshard", "."] {
        for folder in ["src", "tests", "benches"] {
            let folder = root().join(member).join(folder);
            lifted.extend(
                sources(&folder).into_iter().filter(|file| lifts(&fs::read_to_string(file).unwrap(), lint)),
            );
        }
    }
    assert!(lifted.iter().any(|file| file.ends_with("backend/cpu/gemm.rs")), "the search finds what it must");
    let own = Path::new("tests/it/architecture.rs");
    let is_allowed = |file: &Path| {
        let file = file.with_extension("");
        UNSAFE_ROOMS.iter().any(|room| file.starts_with(room))
    };
    for file in lifted {
        let file = file.strip_prefix(root()).unwrap();
        let file = file.strip_prefix(".").unwrap_or(file);
        assert!(file == own || is_allowed(file), "`{}` must not hold unsafe code", file.display());
    }
}

/// Whether a text names the lint other than to deny or forbid it.
fn lifts(text: &str, lint: &str) -> bool {
    let denied = ["forbid", "deny"].map(|level| format!("#![{level}({lint})]"));
    text.lines().any(|line| line.contains(lint) && !denied.iter().any(|denied| line.trim() == denied))
}

/// All Rust files under a folder, if there is one.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Every file that the map names: a path in the repository, or in the folder that the heading above it names.
fn files_on_the_map() -> Vec<PathBuf> {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut folder = "";
    let mut files = Vec::new();
    for line in map.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            folder = heading.strip_prefix('`').and_then(|heading| heading.strip_suffix('`')).unwrap_or("");
        }
        let in_backticks = line.split('`').skip(1).step_by(2);
        for name in in_backticks.filter(|name| [".rs", ".md", ".py"].iter().any(|end| name.ends_with(end))) {
            let places = [Path::new(folder).join(name), PathBuf::from(name)];
            let file = places.into_iter().find(|file| root().join(file).is_file());
            files.push(file.unwrap_or_else(|| panic!("`{name}` is on the map, but not in `{folder}`")));
        }
    }
    files
}

#[test]
fn every_file_on_the_map_is_there_and_every_source_file_is_on_the_map() {
    let files = files_on_the_map();
    let is_on_the_map = |file: &Path| files.iter().any(|named| named == file);
    for folder in ["mesh/src", "ckpt/src", "train/src", "reshard/src", "src"] {
        let sources = sources(&root().join(folder));
        assert!(sources.len() > 2, "{folder}");
        for file in sources {
            let file = file.strip_prefix(root()).unwrap();
            // What stands below a module of the map is a part of it.
            let mut modules = file.ancestors().skip(1).map(|folder| folder.with_extension("rs"));
            assert!(
                is_on_the_map(file) || modules.any(|module| is_on_the_map(&module)),
                "`{}` is not on the map",
                file.display()
            );
        }
    }
}
