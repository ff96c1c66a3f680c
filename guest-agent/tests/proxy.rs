//! The way from the host to TCP ports of the guest.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Agent, run};
use coppice_agent_protocol::proxy::{Reply, encode_request};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixStream};

type Client = BufReader<UnixStream>;

/// Sends bytes to the proxy; its reply and the connection.
async fn ask(agent: &Agent, bytes: &[u8]) -> (Reply, Client) {
    let mut stream = UnixStream::connect(agent.path("proxy")).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut client = BufReader::new(stream);
    let mut line = Vec::new();
    client.read_until(b'\n', &mut line).await.unwrap();
    let reply = Reply::decode(line.strip_suffix(b"\n").unwrap()).unwrap();
    (reply, client)
}

async fn listen(address: &str) -> (TcpListener, u16) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Both ends of a connection through the proxy.
async fn connected(agent: &Agent) -> (Client, TcpStream) {
    let (listener, port) = listen("127.0.0.1").await;
    let (reply, client) = ask(agent, &encode_request(port)).await;
    assert_eq!(reply, Reply::Connected);
    (client, listener.accept().await.unwrap().0)
}

#[test]
fn bytes_flow_both_ways() {
    run(async {
        let agent = Agent::start().await;
        let (mut client, mut server) = connected(&agent).await;
        for _ in 0..3 {
            client.write_all(b"ping").await.unwrap();
            let mut bytes = [0; 4];
            server.read_exact(&mut bytes).await.unwrap();
            server.write_all(b"pong").await.unwrap();
            client.read_exact(&mut bytes).await.unwrap();
            assert_eq!(&bytes, b"pong");
        }
    });
}

#[test]
fn what_follows_the_request_at_once_is_not_lost() {
    run(async {
        let agent = Agent::start().await;
        let (listener, port) = listen("127.0.0.1").await;
        let bytes = [encode_request(port), b"early".to_vec()].concat();
        let (reply, mut client) = ask(&agent, &bytes).await;
        assert_eq!(reply, Reply::Connected);
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        let mut server = listener.accept().await.unwrap().0;
        server.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"early");
    });
}

#[test]
fn a_client_that_stops_sending_still_receives() {
    run(async {
        let agent = Agent::start().await;
        let (mut client, mut server) = connected(&agent).await;
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut question = Vec::new();
        server.read_to_end(&mut question).await.unwrap();
        server.write_all(b"answer").await.unwrap();
        drop(server);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!((&question[..], &answer[..]), (&b"question"[..], &b"answer"[..]));
    });
}

#[test]
fn a_server_that_stops_sending_still_receives() {
    run(async {
        let agent = Agent::start().await;
        let (mut client, mut server) = connected(&agent).await;
        server.shutdown().await.unwrap();
        assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0);
        client.write_all(b"more").await.unwrap();
        let mut bytes = [0; 4];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"more");
    });
}

#[test]
fn a_port_nobody_listens_on_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let (listener, port) = listen("127.0.0.1").await;
        drop(listener);
        let (reply, mut client) = ask(&agent, &encode_request(port)).await;
        assert_eq!(reply, Reply::Refused);
        assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0);
    });
}

#[test]
fn a_server_on_ipv6_alone_is_found() {
    if std::net::TcpListener::bind(("::1", 0)).is_err() {
        println!("this machine has no IPv6, so this is not tested");
        return;
    }
    run(async {
        let agent = Agent::start().await;
        let (_listener, port) = listen("::1").await;
        assert_eq!(ask(&agent, &encode_request(port)).await.0, Reply::Connected);
    });
}

#[test]
fn malformed_requests_are_refused() {
    run(async {
        let agent = Agent::start().await;
        for request in [&b"GET / HTTP/1.1\r\n"[..], b"CONNECT 0\n", b"CONNECT 123456789", b"\n"] {
            let (reply, _) = ask(&agent, request).await;
            assert!(matches!(reply, Reply::Failed(_)), "{request:?}");
        }
    });
}

#[test]
fn much_arrives_whole_through_little_memory() {
    run(async {
        let agent = Agent::start().await;
        let (mut client, mut server) = connected(&agent).await;
        let data: Vec<u8> = (0..20_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
        let (sent, mut received) = (data.clone(), Vec::new());
        let send = async {
            server.write_all(&sent).await.unwrap();
            server.shutdown().await.unwrap();
        };
        tokio::join!(send, async { client.read_to_end(&mut received).await.unwrap() });
        assert!(received == data);
        assert!(agent.private_kib() < 8 * 1024);
    });
}

#[test]
fn a_reader_that_stops_stops_its_writer() {
    run(async {
        let agent = Agent::start().await;
        let (client, mut server) = connected(&agent).await;
        let flood = async {
            loop {
                server.write_all(&vec![0; 65_536]).await.unwrap();
            }
        };
        let pause = std::time::Duration::from_millis(300);
        assert!(tokio::time::timeout(pause, flood).await.is_err());
        assert!(agent.private_kib() < 8 * 1024);
        drop(client);
    });
}

#[test]
fn what_a_client_sent_before_it_left_arrives() {
    run(async {
        let agent = Agent::start().await;
        let (mut client, mut server) = connected(&agent).await;
        client.write_all(&vec![7; 100_000]).await.unwrap();
        drop(client);
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, vec![7; 100_000]);
    });
}
