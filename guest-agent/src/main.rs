//! Entry point of the agent; everything is in the library.

use std::process::ExitCode;

use coppice_agent::{Options, is_init, run};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1), is_init()) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("coppice-agent: {error}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("coppice-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
