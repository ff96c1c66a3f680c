//! What an agent platform does with a sandbox, on the library alone: boot it, run commands in it,
//! move files in and out, look at what it costs, end it.
//!
//! Prints one JSON object. `cargo xtask demo` builds what this needs and runs it where guests
//! can boot.

use std::io::Cursor;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use coppice_agent_protocol::process::{DataEvent, ProcessConfig, ProcessEvent};
use coppice_manager::agent::{Agent, Outcome, Start};
use coppice_manager::home::Home;
use coppice_manager::sandbox::{Config, Sandbox};
use coppice_manager::{vmm, workdir};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Size of the files that travel, in bytes.
const FILE_SIZE: usize = 1 << 20;
/// A program whose answer is known.
const PYTHON: &str = "import platform; print(platform.python_version(), sum(range(1001)))";
/// What the guest's processes have to end in order.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Shown {
    boot_ms: f64,
    first_output_ms: f64,
    vmm_pss_kib: u64,
    kernel: String,
    guest_python: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let home = Home::from_env();
    // The program is in a directory below that of the others.
    let programs = std::env::current_exe()?;
    let programs = programs.parent().and_then(|dir| dir.parent()).context("no programs")?;
    let config = Config {
        vmm: vmm::locate(Some(programs.join("coppice-vmm")))?,
        kernel: home.kernel("agent")?,
        image: home.image("base")?,
        memory_mib: 512,
        vcpus: 1,
        append: None,
        scratch: home.path().to_owned(),
        runtime: workdir::base(),
        boot_timeout: Duration::from_secs(180),
    };
    let (sandbox, boot) = Sandbox::start(&config).await.map_err(|error| error.failure())?;
    let agent = sandbox.agent();

    let uname = command(agent, "uname", &["-a"]).await?;
    let first_output = uname.first_output.context("uname printed nothing")?;
    eprintln!("uname -a: {}", uname.text.trim());
    let kernel = command(agent, "uname", &["-r"]).await?.text.trim().to_owned();

    let python = command(agent, "python3", &["-c", PYTHON]).await?.text;
    let (version, sum) = python.trim().split_once(' ').context("Python printed something else")?;
    ensure!(sum == "500500", "Python computed {sum} instead of 500500");
    eprintln!("python3: version {version} adds 1 to 1000 to {sum}");

    round_trip(agent).await?;
    eprintln!("files: {FILE_SIZE} bytes each way, the checksums agree");

    let memory = sandbox.memory_use()?;
    sandbox.shutdown(GRACE).await;
    let shown = Shown {
        boot_ms: ms(boot.until_ready),
        first_output_ms: ms(first_output.saturating_duration_since(sandbox.started())),
        vmm_pss_kib: memory.pss_kib,
        kernel,
        guest_python: version.to_owned(),
    };
    println!("{}", serde_json::to_string(&shown)?);
    Ok(())
}

struct Output {
    text: String,
    first_output: Option<Instant>,
}

/// Runs a command that must succeed.
async fn command(agent: &Agent, program: &str, args: &[&str]) -> Result<Output> {
    let process = ProcessConfig {
        cmd: program.to_owned(),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        ..ProcessConfig::default()
    };
    let mut stream = agent.start(Start { process, ..Start::default() }).await?;
    let (mut text, mut errors, mut first_output, mut outcome) = (vec![], vec![], None, None);
    while let Some(event) = stream.next().await? {
        match event {
            ProcessEvent::Data(DataEvent { stdout, stderr, .. }) => {
                first_output.get_or_insert_with(Instant::now);
                text.extend(stdout.into_iter().flat_map(|blob| blob.0));
                errors.extend(stderr.into_iter().flat_map(|blob| blob.0));
            }
            ProcessEvent::End(end) => outcome = Some(Outcome::of(&end)),
            _ => {}
        }
    }
    let errors = String::from_utf8_lossy(&errors);
    ensure!(outcome == Some(Outcome::Exited(0)), "{program} failed in the guest: {errors}");
    Ok(Output { text: String::from_utf8(text)?, first_output })
}

/// Random bytes in, and others out; both sides compute the checksums.
async fn round_trip(agent: &Agent) -> Result<()> {
    let mut data = vec![0u8; FILE_SIZE];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut data)?;
    let expected = hex(&Sha256::digest(&data));
    agent.upload("/tmp/in", None, Cursor::new(data)).await?;
    ensure!(guest_sum(agent, "/tmp/in").await? == expected, "the upload differs");

    let make = format!("head -c {FILE_SIZE} /dev/urandom > /tmp/out");
    command(agent, "sh", &["-c", &make]).await?;
    let expected = guest_sum(agent, "/tmp/out").await?;
    let mut download = agent.download("/tmp/out", None).await?;
    let mut sum = Sha256::new();
    while let Some(piece) = download.next().await? {
        sum.update(&piece);
    }
    ensure!(hex(&sum.finalize()) == expected, "the download differs");
    Ok(())
}

async fn guest_sum(agent: &Agent, path: &str) -> Result<String> {
    let text = command(agent, "sha256sum", &[path]).await?.text;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}
