//! README.md, docs/ and the other pages against the program: links lead somewhere, commands parse, keys exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MOST_WORDS: usize = 900;
const MOST_COLUMNS: usize = 130;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn evenkeel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_evenkeel")).args(arguments).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// Every page that users and developers read, with its path from the root.
fn pages() -> Vec<(String, String)> {
    let mut names: Vec<String> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md"].map(String::from).into();
    for entry in fs::read_dir(root().join("docs")).expect("docs/") {
        let name = entry.expect("an entry").file_name().into_string().expect("a readable name");
        names.extend(name.ends_with(".md").then(|| format!("docs/{name}")));
    }
    names.sort();
    let read = |name: String| (fs::read_to_string(root().join(&name)).expect("a page"), name);
    names.into_iter().map(read).map(|(text, name)| (name, text)).collect()
}

/// A page's code and its prose. Code is indented by four or stands between fences; a line that ends in `\` goes on.
fn split(page: &str) -> (Vec<String>, String) {
    let (mut code, mut prose) = (Vec::new(), String::new());
    let (mut is_fenced, mut goes_on) = (false, false);
    for line in page.lines() {
        let is_fence = line.starts_with("```");
        is_fenced ^= is_fence;
        if is_fence || !(is_fenced || line.starts_with("    ")) {
            prose.push_str(if is_fence { "" } else { line });
            prose.push('\n');
            continue;
        }
        let (line, continues) = line.trim().strip_suffix('\\').map_or((line.trim(), false), |line| (line.trim(), true));
        match code.last_mut() {
            Some(last) if goes_on => *last = format!("{last} {line}"),
            _ => code.push(line.to_owned()),
        }
        goes_on = continues;
    }
    (code, prose)
}

/// The texts between backticks, each on one line.
fn spans(prose: &str) -> Vec<String> {
    prose.split('`').skip(1).step_by(2).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// The arguments of every `evenkeel …` that a page shows; `evenkeel 0.1.0` is what `doctor` prints.
fn commands(page: &str) -> Vec<Vec<String>> {
    let (code, prose) = split(page);
    let shown = code.iter().map(|line| line.strip_prefix("$ ").unwrap_or(line).to_owned());
    let arguments = |line: String| {
        let of_cargo = line.strip_prefix("cargo run --release -- ");
        line.strip_prefix("evenkeel ").or(of_cargo).map(words)
    };
    let is_command = |arguments: &Vec<String>| arguments[0].starts_with(char::is_alphabetic);
    shown.chain(spans(&prose)).filter_map(arguments).filter(is_command).collect()
}

/// As a shell reads a line without variables.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for character in line.chars() {
        match (quote, character) {
            (None, '\'' | '"') => quote = Some(character),
            (Some(open), _) if open == character => quote = None,
            // A comment, or where the output goes.
            (None, '#' | '>') if word.is_empty() => break,
            (None, ' ') => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
            _ => word.push(character),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    words
}

#[test]
fn configuration_md_is_what_the_table_of_keys_gives() {
    let output = evenkeel(&["config", "--explain", "--markdown"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(root().join("docs/configuration.md")).expect("a page");
    let update = "run `evenkeel config --explain --markdown > docs/configuration.md`";
    for (number, (page, program)) in page.lines().zip(text(&output.stdout).lines()).enumerate() {
        assert_eq!(page, program, "docs/configuration.md, line {}; {update}", number + 1);
    }
    assert_eq!(page, text(&output.stdout), "{update}");
}

#[test]
fn every_relative_link_leads_to_a_file() {
    let mut count = 0;
    for (name, page) in pages() {
        let folder = root().join(&name).parent().expect("a folder").to_owned();
        for link in split(&page).1.split("](").skip(1) {
            let link = link.split(')').next().expect("a part");
            let file = link.split('#').next().expect("a part");
            if !link.contains("://") && !file.is_empty() {
                assert!(folder.join(file).exists(), "{name}: {link}");
                count += 1;
            }
        }
    }
    assert!(count > 20, "{count} links");
}

/// clap reads arguments from left to right and stops at `--help`, so it refuses what it does not know before that.
#[test]
fn every_command_parses_and_every_key_exists() {
    let reference = evenkeel(&["config", "--explain", "--markdown"]);
    let keys: BTreeSet<String> = spans(text(&reference.stdout)).into_iter().collect();
    let mut tried = BTreeSet::new();
    for (name, page) in pages() {
        for command in commands(&page) {
            for key in command.windows(2).filter(|pair| pair[0] == "--set").map(|pair| &pair[1]) {
                let key = key.split('=').next().expect("a part");
                assert!(keys.contains(key), "{name}: `{key}` in {command:?}");
            }
            if tried.insert(command.clone()) {
                let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
                arguments.push("--help");
                let output = evenkeel(&arguments);
                assert!(output.status.success(), "{name}: {command:?}: {}", text(&output.stderr));
            }
        }
    }
    assert!(tried.len() > 40, "{} commands", tried.len());
}

#[test]
fn every_example_of_a_configuration_has_known_keys_and_values() {
    let folder = tempfile::tempdir().unwrap();
    let mut count = 0;
    for (name, page) in pages() {
        for example in page.split("```toml\n").skip(1) {
            let example = example.split("```").next().expect("a part");
            let file = folder.path().join("example.toml");
            fs::write(&file, example).unwrap();
            let output = evenkeel(&["config", file.to_str().expect("a readable path")]);
            let said = text(&output.stderr);
            // Parts of a configuration lack other keys; what they have must be right.
            let wrong = said.lines().find(|line| line.contains("example.toml:"));
            assert_eq!(wrong, None, "{name}: {example}");
            count += 1;
        }
    }
    assert!(count > 3, "{count} examples");
}

#[test]
fn the_readme_is_short_and_names_its_two_commands() {
    let readme = fs::read_to_string(root().join("README.md")).expect("a page");
    let count = readme.split_whitespace().count();
    assert!(count <= MOST_WORDS, "{count} words, at most {MOST_WORDS}");
    for command in ["cargo run --release -- train examples/quickstart.toml", "cargo test --workspace --locked"] {
        assert!(readme.contains(command), "{command}");
    }
}

#[test]
fn pages_for_users_are_wrapped() {
    for (name, page) in pages().into_iter().filter(|(name, _)| name != "ARCHITECTURE.md") {
        for (number, line) in page.lines().enumerate().filter(|(_, line)| !line.starts_with('|')) {
            assert!(line.chars().count() <= MOST_COLUMNS, "{name}, line {}: {line}", number + 1);
        }
    }
}
