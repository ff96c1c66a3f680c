//! Passes standard input on to the command in the guest.

use std::sync::Arc;

use coppice_manager::agent::{Agent, Error};
use tokio::io::AsyncReadExt;

/// Bytes passed on at a time.
const PIECE: usize = 32 * 1024;
/// What a terminal sends for the end of input (Ctrl-D).
const END_OF_INPUT: &[u8] = &[4];

/// Reads standard input to its end and gives it to the process, each piece once the process took
/// the one before.
///
/// # Errors
/// The agent's, when the process does not take input any more.
pub(super) async fn forward(agent: Arc<Agent>, pid: u32, tty: bool) -> Result<(), Error> {
    let mut stdin = tokio::io::stdin();
    let mut piece = vec![0u8; PIECE];
    while let Ok(count @ 1..) = stdin.read(&mut piece).await {
        agent.send_input(pid, piece.get(..count).unwrap_or_default(), tty).await?;
    }
    if tty { agent.send_input(pid, END_OF_INPUT, true).await } else { agent.close_stdin(pid).await }
}
