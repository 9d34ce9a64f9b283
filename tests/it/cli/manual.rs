//! What the README and the documents show is what the commands do, and what help lists is what `docs/cli.md` has.

use super::{ok, remesh, text};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Stands before a block that cannot be run, with the reason.
const NOT_RUN: &str = "<!-- not run: ";

/// A fenced block of commands.
struct Block {
    /// Its document and line.
    place: String,
    /// Whether it shows commands behind `$ `, and what they print.
    is_console: bool,
    lines: Vec<String>,
    /// Why it cannot be run.
    not_run: Option<String>,
}

fn documents() -> Vec<PathBuf> {
    let docs = std::fs::read_dir(Path::new(ROOT).join("docs")).unwrap();
    let mut docs: Vec<PathBuf> = docs.map(|entry| entry.unwrap().path()).collect();
    docs.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    docs.sort();
    [vec![Path::new(ROOT).join("README.md")], docs].concat()
}

/// The blocks of commands of a document, in order.
fn blocks(path: &Path) -> Vec<Block> {
    let document = std::fs::read_to_string(path).unwrap();
    let mut blocks = Vec::new();
    let mut lines = (1..).zip(document.lines());
    let mut before = "";
    while let Some((number, line)) = lines.next() {
        let kind = line.strip_prefix("```");
        if let Some(kind) = kind {
            let inside = lines.by_ref().map(|(_, line)| line.to_owned()).take_while(|line| line != "```");
            let lines = inside.collect();
            let not_run =
                before.strip_prefix(NOT_RUN).map(|reason| reason.trim_end_matches(" -->").to_owned());
            if ["bash", "sh", "console"].contains(&kind) {
                let place = format!("{}:{number}", path.strip_prefix(ROOT).unwrap().display());
                blocks.push(Block { place, is_console: kind == "console", lines, not_run });
            } else {
                assert!(not_run.is_none(), "{}:{number} is no block of commands", path.display());
            }
        }
        before = line;
    }
    blocks
}

/// Runs commands as a shell does, with the built program in its path, and returns what they print.
fn shell(folder: &Path, place: &str, script: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_remesh")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.current_dir(folder).args(["-euc", script]).env("PATH", path).env_remove("RUST_LOG");
    let output = shell.output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{place}: {}\n{said}", output.status);
    said
}

impl Block {
    fn run(&self, folder: &Path) {
        if !self.is_console {
            shell(folder, &self.place, &self.lines.join("\n"));
            return;
        }
        let mut printed = String::new();
        for line in &self.lines {
            match line.strip_prefix("$ ") {
                Some(command) => printed = shell(folder, &self.place, command),
                None => {
                    let is_there = printed.lines().any(|printed| printed == line);
                    assert!(is_there, "{}: `{line}` is not in\n{printed}", self.place);
                }
            }
        }
    }
}

/// All blocks in order in one folder, which has what they take for granted: the documents, and somebody's books and tokenizer.
#[test]
fn every_block_of_commands_in_the_documents_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for name in ["README.md", "docs", "examples"] {
        std::os::unix::fs::symlink(Path::new(ROOT).join(name), folder.join(name)).unwrap();
    }
    let tokenizer = Path::new(ROOT).join("tests/fixtures/tokenizer");
    std::os::unix::fs::symlink(tokenizer, folder.join("llama")).unwrap();
    std::fs::create_dir(folder.join("books")).unwrap();
    let book = std::fs::File::create(folder.join("books/1.jsonl.gz")).unwrap();
    let mut book = flate2::write::GzEncoder::new(book, flate2::Compression::fast());
    writeln!(book, "{{\"text\": \"Call me Ishmael.\"}}").unwrap();
    book.finish().unwrap();

    let blocks: Vec<Block> = documents().iter().flat_map(|path| blocks(path)).collect();
    let (run, not_run): (Vec<&Block>, Vec<&Block>) = blocks.iter().partition(|block| block.not_run.is_none());
    assert!(run.len() >= 2 && run.iter().any(|block| block.is_console), "{} blocks", run.len());
    run.iter().for_each(|block| block.run(folder));
    // Past the harness, which keeps what a test that passes prints to itself.
    for block in &not_run {
        let why = block.not_run.as_deref().unwrap_or_default();
        let _ = writeln!(std::io::stderr(), "NOT RUN: {}: {why}", block.place);
    }
    let _ = writeln!(std::io::stderr(), "{} blocks of commands ran, {} did not", run.len(), not_run.len());
}

/// The commands that help lists below `command`, with those below them.
fn commands(command: &str) -> Vec<String> {
    let help = ok(Path::new(ROOT), &format!("{command} --help"));
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let below = names.flat_map(|line| {
        let name = line.split(' ').next().expect("a line has a first word");
        commands(format!("{command} {name}").trim_start())
    });
    let mut all: Vec<String> = below.collect();
    all.push(command.to_owned());
    all
}

/// The flags that begin a line of help, with the aliases behind them.
fn flags_of_help(help: &str) -> BTreeSet<String> {
    let declared = help.lines().filter(|line| line.starts_with("  -") || line.starts_with("      --"));
    let declared = declared.filter_map(|line| flags(line).into_iter().next());
    let aliases =
        help.split("[alias").skip(1).flat_map(|rest| flags(rest.split(']').next().unwrap_or_default()));
    declared.chain(aliases).collect()
}

/// The long flags that a text has.
fn flags(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("--") {
        let is_start = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '-');
        let name: String =
            text[at + 2..].chars().take_while(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).collect();
        if is_start && name.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.push(format!("--{}", name.trim_end_matches('-')));
        }
    }
    found
}

#[test]
fn every_flag_of_help_is_in_the_document_and_every_flag_of_the_document_is_taken() {
    let document = std::fs::read_to_string(Path::new(ROOT).join("docs/cli.md")).unwrap();
    let documented: BTreeSet<String> = flags(&document).into_iter().collect();
    let mut listed = BTreeSet::new();
    for command in commands("") {
        let help = ok(Path::new(ROOT), &format!("{command} --help"));
        let flags = flags_of_help(&help);
        assert!(flags.contains("--help"), "`{command}`: {help}");
        let missing: Vec<&String> = flags.difference(&documented).collect();
        assert!(missing.is_empty(), "docs/cli.md has not {missing:?} of `remesh {command}`");
        listed.extend(flags);
    }
    assert!(listed.len() > 120, "{}", listed.len());
    // What help does not list are flags of launch scripts, which `train` knows, too.
    for flag in documented.difference(&listed) {
        let said = text(&remesh(Path::new(ROOT), &format!("train {flag}")).stderr);
        assert!(!said.contains("unexpected argument"), "docs/cli.md has `{flag}`: {said}");
    }
}
