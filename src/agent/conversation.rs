//! A conversation as it is sent, and how many tokens it takes.
//!
//! Knows messages and their order. Must not know what is in a call, nor how anything is sent.

use serde_json::{Value, json};

use crate::gateway::chat::Reply;
use crate::gateway::tokens::{Usage, estimate};

/// Messages so far.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<Value>,
    /// Tokens up to and with the last answer, by the server's count.
    counted: u64,
    /// Bytes of what came after it.
    fresh: usize,
}

/// Characters of an answer that was cut off for its length which stay in the conversation.
const CUT: usize = 2000;

impl Conversation {
    /// `overhead` is what goes with each request beside the messages: bytes of the tools' definitions.
    #[must_use]
    pub fn new(overhead: usize) -> Self {
        Self { messages: Vec::new(), counted: 0, fresh: overhead }
    }

    #[must_use]
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Tokens that the next request takes: counted by the server as far as it has seen them, estimated beyond.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.counted + estimate(self.fresh)
    }

    fn push(&mut self, message: Value) {
        self.fresh += message.to_string().len();
        self.messages.push(message);
    }

    /// What is said to the model.
    pub fn say(&mut self, role: &str, content: &str) {
        self.push(json!({"role": role, "content": content}));
    }

    /// The result of a call.
    pub fn result(&mut self, call: &str, content: &str) {
        self.push(json!({"role": "tool", "tool_call_id": call, "content": content}));
    }

    /// What the model said, in a form that every server takes back: arguments that are no JSON object would make
    /// some of them refuse all that follows. Of an answer that was cut off only the beginning stays, and no call.
    pub fn answer(&mut self, reply: &Reply) {
        let mut message = json!({"role": "assistant"});
        if reply.cut_at.is_some() {
            message["content"] = json!(reply.content.chars().take(CUT).collect::<String>());
        } else {
            message["content"] = json!(reply.content);
            if let Some(reasoning) = &reply.reasoning {
                message[&reasoning.field] = json!(reasoning.text);
            }
            if !reply.calls.is_empty() {
                let calls = reply.calls.iter().map(|call| {
                    let object = serde_json::from_str::<Value>(&call.arguments).is_ok_and(|v| v.is_object());
                    let arguments = if object {
                        call.arguments.clone()
                    } else {
                        json!({"not_valid_json": call.arguments.chars().take(CUT).collect::<String>()}).to_string()
                    };
                    let name = if call.name.is_empty() { "unnamed" } else { &call.name };
                    json!({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
                });
                message["tool_calls"] = calls.collect();
            }
        }
        self.messages.push(message);
        self.count(&reply.usage, reply.cut_at.is_some());
    }

    fn count(&mut self, usage: &Usage, cut: bool) {
        if usage.estimated {
            // The server does not count: the messages are what there is to go by.
            let last = self.messages.last().map_or(0, |m| m.to_string().len());
            self.fresh += last;
            return;
        }
        self.counted = usage.prompt + if cut { 0 } else { usage.completion };
        self.fresh = if cut { CUT } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::chat::{Call, Reasoning};

    #[test]
    fn tokens_are_the_servers_count_and_an_estimate_of_what_came_after() {
        let mut conversation = Conversation::new(330);
        conversation.say("user", "hi");
        let estimated = conversation.tokens();
        assert!((100..130).contains(&estimated), "{estimated}");
        let usage = Usage { prompt: 1000, completion: 50, cached: 0, estimated: false };
        conversation.answer(&Reply { usage, content: "x".repeat(5000), ..Reply::default() });
        assert_eq!(conversation.tokens(), 1050);
        conversation.result("a", &"y".repeat(330));
        assert!((1150..1180).contains(&conversation.tokens()));
    }

    #[test]
    fn what_goes_back_is_what_every_server_takes() {
        let mut conversation = Conversation::default();
        let call =
            |name: &str, arguments: &str| Call { id: "a".into(), name: name.into(), arguments: arguments.into() };
        conversation.answer(&Reply {
            reasoning: Some(Reasoning { field: "reasoning_content".into(), text: "hm".into() }),
            calls: vec![call("Bash", "{\"command\": \"ls\"}"), call("", "{\"command\": "), call("Read", "[1]")],
            ..Reply::default()
        });
        let message = &conversation.messages()[0];
        assert_eq!(message["reasoning_content"], "hm");
        let arguments = |i: usize| message["tool_calls"][i]["function"]["arguments"].as_str().unwrap().to_owned();
        assert_eq!(arguments(0), "{\"command\": \"ls\"}");
        assert_eq!(arguments(1), r#"{"not_valid_json":"{\"command\": "}"#);
        assert_eq!(arguments(2), r#"{"not_valid_json":"[1]"}"#);
        assert_eq!(message["tool_calls"][1]["function"]["name"], "unnamed");
    }

    #[test]
    fn of_an_answer_that_was_cut_off_the_beginning_stays() {
        let mut conversation = Conversation::default();
        let calls = vec![Call { id: "a".into(), name: "Bash".into(), arguments: "{".into() }];
        conversation.answer(&Reply { content: "z".repeat(1 << 20), calls, cut_at: Some(1 << 20), ..Reply::default() });
        assert_eq!(conversation.messages()[0]["content"].as_str().unwrap().len(), CUT);
        assert!(conversation.messages()[0].get("tool_calls").is_none());
        assert!(conversation.tokens() < 1000);
    }
}
