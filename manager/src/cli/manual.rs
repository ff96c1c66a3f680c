//! Shell completions and manual pages, both made from the command line's own description.

use std::path::PathBuf;

use clap::CommandFactory as _;
use clap_complete::Shell;
use coppice_manager::failure::{Class, Failure};

use super::Cli;

/// Shown by `-h`.
pub(super) const COMPLETIONS_HELP: &str = "\
Examples:
  coppice completions bash > ~/.local/share/bash-completion/completions/coppice
  coppice completions zsh > ~/.zfunc/_coppice
  coppice completions fish > ~/.config/fish/completions/coppice.fish";

/// Arguments of `coppice completions`.
#[derive(Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Arguments of `coppice man`.
#[derive(Debug, clap::Args)]
pub(super) struct ManArgs {
    /// Where the pages go; it must be there
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Prints the completions of a shell.
pub(super) fn completions(args: &CompletionsArgs) -> u8 {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "coppice", &mut text);
    super::print(&String::from_utf8_lossy(&text))
}

/// Writes a page for the program and one for each command.
pub(super) fn pages(args: &ManArgs) -> u8 {
    match clap_mangen::generate_to(Cli::command(), &args.directory) {
        Ok(()) => 0,
        Err(error) => {
            let message = format!("{} cannot be written: {error}", args.directory.display());
            super::fail(&Failure::new(Class::Host, message, "name a directory that is there"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of all commands that are shown, as in the names of their pages.
    fn names(command: &clap::Command, before: &str) -> Vec<String> {
        let own = format!("{before}{}", command.get_name());
        let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let below = shown.flat_map(|sub| names(sub, &format!("{own}-")));
        [own.clone()].into_iter().chain(below).collect()
    }

    #[test]
    fn every_command_has_a_page_that_names_its_options() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(pages(&ManArgs { directory: dir.path().into() }), 0);
        let names = names(&Cli::command(), "");
        assert!(names.contains(&"coppice-template-build".to_owned()), "{names:?}");
        for name in names {
            let page = std::fs::read_to_string(dir.path().join(format!("{name}.1")));
            let page = page.unwrap_or_else(|_| panic!("{name} has no page"));
            assert!(page.contains(".SH NAME") && page.contains("help"), "{name}");
        }
        let page = std::fs::read_to_string(dir.path().join("coppice-serve.1")).unwrap();
        assert!(page.contains("log\\-format"), "{page}");
    }

    #[test]
    fn every_command_is_completed_in_each_shell() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "coppice", &mut text);
            let text = String::from_utf8(text).unwrap();
            for command in Cli::command().get_subcommands().filter(|sub| !sub.is_hide_set()) {
                assert!(text.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }
}
