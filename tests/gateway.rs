//! The client of model endpoints against a real HTTP server.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/server.rs"]
#[allow(dead_code)]
mod server;

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kernelfleet::gateway::chat::{Finish, Reply, Request, Sampling};
use kernelfleet::gateway::{Answer, Error, Gateway, Key, Settings, completions};
use serde_json::json;
use server::{Act, Server, say};

fn ask(gateway: &Gateway, seconds: u64) -> Result<Answer<Reply>, Error> {
    let messages = [json!({"role": "user", "content": "hi"})];
    let request =
        Request { model: "m", messages: &messages, tools: &[], sampling: Sampling::default(), max_tokens: 100 };
    gateway.chat(&request, Instant::now() + Duration::from_secs(seconds), &AtomicBool::new(false))
}

fn status(code: u16, headers: Vec<(&'static str, String)>, body: &str) -> Act {
    Act::Status(code, headers, body.into())
}

#[test]
fn whole_answers_and_streams_say_the_same() {
    let server = Server::playing(vec![say("hello")]);
    let streamed = ask(&Gateway::new(Settings::new(&server.url())).unwrap(), 20).unwrap();
    let whole = Gateway::new(Settings { stream: false, ..Settings::new(&server.url()) }).unwrap();
    let whole = ask(&whole, 20).unwrap();
    assert_eq!((&streamed.reply.content, streamed.reply.finish), (&whole.reply.content, Finish::Stop));
    let asked: Vec<bool> = server.requests().iter().map(|r| r["stream"] == true).collect();
    assert_eq!(asked, [true, false]);
}

#[test]
fn a_server_that_knows_the_limit_by_another_name_gets_that_name_from_then_on() {
    let refusal =
        r#"{"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}}"#;
    let server = Server::playing(vec![status(400, vec![], refusal), say("a"), say("b")]);
    let gateway = Gateway::new(Settings::new(&server.url())).unwrap();
    assert_eq!(ask(&gateway, 20).unwrap().reply.content, "a");
    assert_eq!(ask(&gateway, 20).unwrap().reply.content, "b");
    let names: Vec<bool> = server.requests().iter().map(|r| r.get("max_completion_tokens").is_some()).collect();
    assert_eq!(names, [false, true, true]);
}

#[test]
fn token_ids_come_as_the_server_drew_them_and_a_server_without_is_named() {
    let body = json!({"choices": [{"text": "ab", "token_ids": [4, 9], "logprobs": {"token_logprobs": [-0.1, -2.0]}}]});
    let server = Server::playing(vec![Act::Raw(body.to_string())]);
    let gateway = Gateway::new(Settings::new(&server.url())).unwrap();
    let request = completions::Request { model: "m", prompt: &[1, 2, 3], sampling: Sampling::default(), max_tokens: 5 };
    let stop = AtomicBool::new(false);
    let answer = gateway.complete(&request, Instant::now() + Duration::from_secs(20), &stop).unwrap();
    assert_eq!((answer.reply.token_ids, answer.reply.logprobs), (vec![4, 9], vec![-0.1, -2.0]));
    assert_eq!(server.requests()[0]["prompt"], json!([1, 2, 3]));
    let without = Server::playing(vec![Act::Raw(r#"{"choices": [{"text": "ab"}]}"#.into())]);
    let mut settings = Settings::new(&without.url());
    settings.limits.first_wait = Duration::from_millis(1);
    let gateway = Gateway::new(settings).unwrap();
    let error = gateway.complete(&request, Instant::now() + Duration::from_secs(20), &stop).unwrap_err();
    assert!(matches!(&error, Error::Unavailable { what, tries: 6 } if what.contains("gives no token ids")), "{error}");
}

#[test]
fn what_is_told_to_come_back_later_is_heeded_by_all_agents() {
    let server = Server::playing(vec![status(429, vec![("retry-after", "0.6".into())], "{}"), say("late")]);
    let gateway = Gateway::new(Settings::new(&server.url())).unwrap();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| ask(&gateway, 20).unwrap());
        while server.state.lock().unwrap().count == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(100));
        let second = ask(&gateway, 20).unwrap();
        assert!(began.elapsed() > Duration::from_millis(600), "the second agent did not wait");
        assert_eq!((first.join().unwrap().retries, second.retries), (1, 0));
    });
}

#[test]
fn a_deadline_a_stop_and_an_absent_server_are_told_apart() {
    let server = Server::playing(vec![Act::Hang]);
    let gateway = Gateway::new(Settings::new(&server.url())).unwrap();
    assert!(matches!(ask(&gateway, 1), Err(Error::Deadline(_))));
    let messages = [json!({"role": "user", "content": "hi"})];
    let request =
        Request { model: "m", messages: &messages, tools: &[], sampling: Sampling::default(), max_tokens: 100 };
    let stopped = gateway.chat(&request, Instant::now() + Duration::from_secs(20), &AtomicBool::new(true));
    assert_eq!(stopped, Err(Error::Stopped));
    // A port that nobody listens at.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut settings = Settings::new(&format!("http://127.0.0.1:{port}/v1"));
    (settings.limits.unreachable_tries, settings.limits.first_wait) = (3, Duration::from_millis(1));
    let told = std::sync::Mutex::new(Vec::new());
    let telling = |what: &str| told.lock().unwrap().push(what.to_owned());
    let gateway = Gateway::new(settings).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let error = gateway.chat_telling(&request, until, &AtomicBool::new(false), &telling).unwrap_err();
    assert!(matches!(error, Error::Unreachable { tries: 3, .. }), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}/v1 can't be reached")), "{error}");
    let told = told.into_inner().unwrap();
    assert_eq!(told.len(), 2);
    assert!(told[0].contains("can't be reached") && told[0].contains("attempt 2 in "), "{told:?}");
}

#[test]
fn a_key_that_a_server_repeats_is_redacted_and_refusals_are_not_tried_again() {
    let key = "sk-test-0123456789";
    let server = Server::playing(vec![status(401, vec![], &format!("{{\"error\": \"no such key: {key}\"}}"))]);
    let settings = Settings { key: Some(Key::new(key).unwrap()), ..Settings::new(&server.url()) };
    let gateway = Gateway::new(settings).unwrap();
    let error = ask(&gateway, 20).unwrap_err().to_string();
    assert!(error.contains("no such key: [key]") && !error.contains(key), "{error}");
    assert!(!format!("{gateway:?}").contains(key));
    assert_eq!(server.requests().len(), 1);
    let quota = r#"{"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}"#;
    let server = Server::playing(vec![status(429, vec![], quota)]);
    let error = ask(&Gateway::new(Settings::new(&server.url())).unwrap(), 20).unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && server.requests().len() == 1, "{error}");
}

#[test]
fn a_key_that_was_just_changed_is_waited_for_and_one_that_stays_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "sk-of-yesterday").unwrap();
    let settings = |server: &Server| {
        let mut settings = Settings { key_file: Some(file.clone()), ..Settings::new(&server.url()) };
        (settings.limits.key_tries, settings.limits.key_wait) = (3, Duration::from_millis(1));
        settings
    };
    let denied = || status(401, vec![], r#"{"error": {"message": "no such key"}}"#);
    let server = Server::playing(vec![denied(), say("again")]);
    let answer = ask(&Gateway::new(settings(&server)).unwrap(), 20).unwrap();
    assert_eq!((answer.reply.content.as_str(), answer.retries), ("again", 1));
    let server = Server::playing(vec![denied()]);
    let error = ask(&Gateway::new(settings(&server)).unwrap(), 20).unwrap_err();
    assert!(matches!(&error, Error::Refused(what) if what.contains("no such key")), "{error}");
    assert_eq!(server.requests().len(), 3);
}
