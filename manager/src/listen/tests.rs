//! Clients that are slow, silent or many, at real sockets.

use std::convert::Infallible;
use std::time::Instant;

use axum::response::Response;
use axum::routing::{get, post};
use http::{Request, StatusCode};
use proptest::prelude::*;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;

/// Time for a head in these tests.
const SHORT: Duration = Duration::from_millis(200);
/// How long a test waits for what must come.
const LONG: Duration = Duration::from_secs(30);

fn door(connections: usize) -> Door {
    let meters = Meters {
        open: IntGauge::new("open", "open").unwrap(),
        refused: IntCounter::new("refused", "refused").unwrap(),
    };
    Door { head_time: SHORT, ..Door::new(connections, meters) }
}

/// Routes that answer at once, late, piece by piece, and by an upgrade.
fn app() -> Router {
    let late = || async {
        sleep(SHORT * 3).await;
        "late"
    };
    let pieces = || async {
        let (sender, body) = http_body_util::channel::Channel::<bytes::Bytes, Infallible>::new(1);
        tokio::spawn(async move {
            let mut sender = sender;
            sender.send_data("a".into()).await.unwrap();
            sleep(SHORT * 3).await;
            sender.send_data("b".into()).await.unwrap();
        });
        Body::new(body)
    };
    let upgrade = |mut request: Request<Body>| async move {
        let place = request.extensions().get::<Place>().cloned();
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let _place = place;
            let mut io = TokioIo::new(upgraded.await.unwrap());
            let mut byte = [0];
            while io.read_exact(&mut byte).await.is_ok() {
                io.write_all(&byte).await.unwrap();
            }
        });
        let answer = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        answer.header("connection", "upgrade").header("upgrade", "x").body(Body::empty()).unwrap()
    };
    Router::new()
        .route("/", get(|| async { "now" }))
        .route("/late", get(late))
        .route("/pieces", get(pieces))
        .route("/body", post(|body: bytes::Bytes| async move { body }))
        .route("/upgrade", get(upgrade))
}

struct Serving {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

async fn serve(door: &Door) -> Serving {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let door = door.clone();
    let ended = tokio::spawn(async move {
        door.serve(listener, app(), async move { drop(stopped.await) }).await;
    });
    Serving { address, stop, ended }
}

async fn send(stream: &mut TcpStream, path: &str, more: &str) {
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
}

/// Reads until `end` has come.
async fn until(stream: &mut TcpStream, end: &str) -> String {
    let mut seen = Vec::new();
    while !seen.ends_with(end.as_bytes()) {
        let mut piece = [0; 512];
        let got = timeout(LONG, stream.read(&mut piece)).await.unwrap().unwrap();
        assert!(got > 0, "no {end:?} after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..got]);
    }
    String::from_utf8(seen).unwrap()
}

/// What comes until the other end closes the connection.
async fn rest(stream: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    // A reset ends it as well.
    let _ = timeout(LONG, stream.read_to_end(&mut rest)).await.unwrap();
    String::from_utf8(rest).unwrap()
}

#[tokio::test]
async fn a_connection_that_says_nothing_ends() {
    let serving = serve(&door(10)).await;
    let mut stream = TcpStream::connect(serving.address).await.unwrap();
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn a_head_that_comes_byte_by_byte_ends_in_time() {
    let serving = serve(&door(10)).await;
    let stream = TcpStream::connect(serving.address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let drip = tokio::spawn(async move {
        let head = "GET / HTTP/1.1\r\nhost: x\r\n".to_owned() + &"a: b\r\n".repeat(1000);
        for byte in head.bytes() {
            if writer.write_all(&[byte]).await.is_err() {
                return;
            }
            sleep(SHORT / 10).await;
        }
    });
    let began = Instant::now();
    let mut answer = Vec::new();
    let _ = timeout(LONG, reader.read_to_end(&mut answer)).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(began.elapsed() < SHORT * 20, "{:?}", began.elapsed());
    drip.abort();
}

#[tokio::test]
async fn a_connection_that_is_not_used_any_more_ends() {
    let serving = serve(&door(10)).await;
    let mut stream = TcpStream::connect(serving.address).await.unwrap();
    for _ in 0..2 {
        send(&mut stream, "/", "").await;
        until(&mut stream, "now").await;
    }
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn what_takes_its_time_is_not_cut() {
    let serving = serve(&door(10)).await;
    let mut stream = TcpStream::connect(serving.address).await.unwrap();
    send(&mut stream, "/late", "").await;
    until(&mut stream, "late").await;
    send(&mut stream, "/pieces", "").await;
    until(&mut stream, "0\r\n\r\n").await;
    stream
        .write_all(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
        .await
        .unwrap();
    sleep(SHORT * 3).await;
    stream.write_all(b"b").await.unwrap();
    until(&mut stream, "ab").await;
    send(&mut stream, "/upgrade", "connection: upgrade\r\nupgrade: x\r\n").await;
    until(&mut stream, "\r\n\r\n").await;
    sleep(SHORT * 3).await;
    stream.write_all(b"q").await.unwrap();
    until(&mut stream, "q").await;
}

#[tokio::test]
async fn there_are_so_many_connections_and_no_more() {
    let door = door(2);
    let serving = serve(&door).await;
    let mut upgraded = TcpStream::connect(serving.address).await.unwrap();
    send(&mut upgraded, "/upgrade", "connection: upgrade\r\nupgrade: x\r\n").await;
    until(&mut upgraded, "\r\n\r\n").await;
    let mut second = TcpStream::connect(serving.address).await.unwrap();
    send(&mut second, "/", "").await;
    until(&mut second, "now").await;
    let mut third = TcpStream::connect(serving.address).await.unwrap();
    let refused = rest(&mut third).await;
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("retry-after: 1"));
    let (_, body) = refused.split_once("\r\n\r\n").unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(body).unwrap()["code"], 503);
    assert_eq!(door.places.meters.refused.get(), 1);
    // One that is over makes place for another; an upgraded one is not over.
    rest(&mut second).await;
    let mut fourth = TcpStream::connect(serving.address).await.unwrap();
    send(&mut fourth, "/", "").await;
    until(&mut fourth, "now").await;
    upgraded.write_all(b"q").await.unwrap();
    until(&mut upgraded, "q").await;
}

#[tokio::test]
async fn what_is_under_way_is_finished_at_the_end_but_not_for_ever() {
    let door = Door { grace: SHORT * 10, ..door(10) };
    let serving = serve(&door).await;
    let mut stream = TcpStream::connect(serving.address).await.unwrap();
    send(&mut stream, "/pieces", "").await;
    until(&mut stream, "a\r\n").await;
    serving.stop.send(()).unwrap();
    until(&mut stream, "0\r\n\r\n").await;
    timeout(LONG, serving.ended).await.unwrap().unwrap();
    assert!(TcpStream::connect(serving.address).await.is_err());

    let door = Door { grace: SHORT, ..door };
    let serving = serve(&door).await;
    let mut stream = TcpStream::connect(serving.address).await.unwrap();
    send(&mut stream, "/late", "").await;
    // It is under way when there is a connection, as the head was sent with it.
    while door.places.meters.open.get() == 0 {
        tokio::task::yield_now().await;
    }
    serving.stop.send(()).unwrap();
    timeout(LONG, serving.ended).await.unwrap().unwrap();
    assert_eq!(rest(&mut stream).await, "");
}

fn peer(ip: &str) -> Peer {
    Peer::Tcp(SocketAddr::new(ip.parse().unwrap(), 1))
}

#[test]
fn a_network_is_what_a_client_cannot_choose() {
    assert_eq!(peer("::ffff:127.0.0.1").network(), None);
    assert_eq!(peer("::1").network(), None);
    assert_eq!(peer("::ffff:10.0.0.1").network(), peer("10.0.0.1").network());
    let [one, two] = ["2001:db8:1:2::3", "2001:db8:1:2:ffff::"].map(|ip| peer(ip).network());
    assert_eq!(one, two);
    assert_ne!(one, peer("2001:db8:1:3::3").network());
}

proptest! {
    /// However connections come and go, none is counted that is not there, and nobody has more
    /// than its part.
    #[test]
    fn places_are_counted(steps in prop::collection::vec((0..4u8, any::<bool>()), 0..200)) {
        let places = Arc::clone(&door(8).places);
        let mut held: Vec<(u8, Place)> = Vec::new();
        for (who, comes) in steps {
            let own = held.iter().filter(|(other, _)| *other == who).count();
            if comes {
                let peer = if who == 0 { Peer::Unix } else { peer(&format!("10.0.0.{who}")) };
                let place = places.take(peer);
                prop_assert_eq!(place.is_some(), held.len() < 8 && (who == 0 || own < 2));
                held.extend(place.map(|place| (who, place)));
            } else if let Some(at) = held.iter().position(|(other, _)| *other == who) {
                held.remove(at);
            }
        }
        prop_assert_eq!(places.taken().all, held.len());
        held.clear();
        prop_assert_eq!(places.taken().all, 0);
        prop_assert!(places.taken().by_network.is_empty());
        prop_assert_eq!(places.meters.open.get(), 0);
    }
}
