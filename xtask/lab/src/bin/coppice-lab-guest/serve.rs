//! The nested machine's agent: accepts connections and checks whom it talks to.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;

use coppice_lab::plan::{GUEST_PLAN_PATH, GuestPlan};
use coppice_lab::wire::{
    AGENT_PORT, Kind, Opening, READY_LINE, Request, VERSION, read_frame, write_frame,
};

use crate::{Outcome, session};

/// Serves until the machine is ended.
pub(crate) fn run() -> Outcome {
    let plan: GuestPlan = serde_json::from_slice(&std::fs::read(GUEST_PLAN_PATH)?)?;
    let token = Arc::new(plan.token);
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, AGENT_PORT))?;
    println!("{READY_LINE}");
    loop {
        let (stream, _) = listener.accept()?;
        let token = Arc::clone(&token);
        std::thread::spawn(move || {
            if let Err(error) = answer(stream, &token) {
                eprintln!("coppice-lab: connection: {error}");
            }
        });
    }
}

fn answer(mut stream: TcpStream, token: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut payload = Vec::new();
    // A port probe connects and goes: not worth a word.
    let Some(kind) = read_frame(&mut stream, &mut payload)? else { return Ok(()) };
    if kind != Kind::Request {
        return write_frame(&mut stream, Kind::Failed, b"the first frame must be a request");
    }
    let opening: Opening = match serde_json::from_slice(&payload) {
        Ok(opening) => opening,
        Err(error) => {
            return write_frame(&mut stream, Kind::Failed, error.to_string().as_bytes());
        }
    };
    if opening.version != VERSION {
        let text = format!("the machine speaks version {VERSION} of the lab's protocol");
        return write_frame(&mut stream, Kind::Failed, text.as_bytes());
    }
    if opening.token != token {
        return write_frame(&mut stream, Kind::Failed, b"wrong token");
    }
    match opening.request {
        Request::Hello => write_frame(&mut stream, Kind::Pong, b""),
        Request::Run(run) => session::run(&run, stream),
    }
}
