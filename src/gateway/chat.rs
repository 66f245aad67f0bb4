//! Chat completions with tools, as OpenAI-compatible servers speak them: what is sent, and how an answer is put
//! together from one body or from a stream of pieces. Pure.
//!
//! Knows the protocol and its dialects. Must not know connections, nor what a tool does.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::tokens::{Usage, estimate};

/// How answers are drawn. What is `None` is left to the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub seed: Option<u64>,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub model: &'a str,
    /// Messages in the form of the protocol.
    pub messages: &'a [Value],
    /// Tools in the form of the protocol; empty for none.
    pub tools: &'a [Value],
    pub sampling: Sampling,
    /// Most tokens of the answer.
    pub max_tokens: u64,
}

/// What differs from server to server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    pub stream: bool,
    /// Ask for token ids and log-probabilities (vLLM, SGLang).
    pub token_ids: bool,
    /// The limit of the answer is called `max_completion_tokens`.
    pub completion_tokens: bool,
}

impl Request<'_> {
    /// The body to send.
    #[must_use]
    pub fn body(&self, dialect: Dialect) -> Value {
        let mut body = json!({"model": self.model, "messages": self.messages});
        if !self.tools.is_empty() {
            body["tools"] = json!(self.tools);
        }
        let limit = if dialect.completion_tokens { "max_completion_tokens" } else { "max_tokens" };
        body[limit] = json!(self.max_tokens);
        if let Some(temperature) = self.sampling.temperature {
            body["temperature"] = json!(temperature);
        }
        if let Some(top_p) = self.sampling.top_p {
            body["top_p"] = json!(top_p);
        }
        if let Some(seed) = self.sampling.seed {
            body["seed"] = json!(seed);
        }
        if dialect.stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
        }
        if dialect.token_ids {
            body["return_token_ids"] = json!(true);
            body["logprobs"] = json!(true);
        }
        body
    }

    /// About how many tokens the server will read.
    #[must_use]
    pub fn prompt_estimate(&self) -> u64 {
        let bytes = |values: &[Value]| values.iter().map(|v| v.to_string().len()).sum::<usize>();
        estimate(bytes(self.messages) + bytes(self.tools))
    }
}

/// A tool call as the model wrote it: nothing of it is checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// Meant to be a JSON object.
    pub arguments: String,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    #[default]
    Stop,
    ToolCalls,
    /// The limit of tokens.
    Length,
    /// The server's filter.
    ContentFilter,
}

impl Finish {
    fn of(word: &str) -> Self {
        match word {
            "length" => Self::Length,
            "content_filter" => Self::ContentFilter,
            "tool_calls" | "function_call" => Self::ToolCalls,
            _ => Self::Stop,
        }
    }
}

/// Tokens as the server drew them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenIds {
    pub prompt: Vec<u32>,
    pub completion: Vec<u32>,
    /// Of each token of `completion`.
    pub logprobs: Vec<f64>,
}

/// What a model answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub content: String,
    /// Thoughts that the server gives apart, and the name it gives them under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<Reasoning>,
    /// The model says that it won't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Call>,
    pub finish: Finish,
    pub usage: Usage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<TokenIds>,
    /// The answer was longer than is read: bytes that had come when the rest was given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_at: Option<u64>,
}

/// Thoughts apart from the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasoning {
    /// `reasoning_content` or `reasoning`.
    pub field: String,
    pub text: String,
}

/// Why a piece or a body is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable(pub String);

/// An answer that is being put together.
#[derive(Debug, Default)]
pub struct Assembly {
    reply: Reply,
    finished: bool,
    counted: bool,
    done: bool,
    /// Bytes of texts so far.
    bytes: usize,
}

/// Most calls in one answer; a server that sends more is broken, and none is lost by a model that means it.
const MAX_CALLS: usize = 128;

impl Assembly {
    /// Bytes of the answer's texts.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the server has said that it ended.
    #[must_use]
    pub const fn finished(&self) -> bool {
        self.finished
    }

    /// Whether the stream's last word has come.
    #[must_use]
    pub const fn done(&self) -> bool {
        self.done
    }

    /// One event of a stream: the text after `data:`.
    ///
    /// # Errors
    /// When it is not what the protocol says; what the server says is wrong is repeated.
    pub fn event(&mut self, data: &str) -> Result<(), Unreadable> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let value: Value =
            serde_json::from_str(data).map_err(|e| Unreadable(format!("an event of the stream is not JSON: {e}")))?;
        self.take(&value, "delta")
    }

    /// A whole body.
    ///
    /// # Errors
    /// As `event`.
    pub fn body(&mut self, body: &[u8]) -> Result<(), Unreadable> {
        let value: Value =
            serde_json::from_slice(body).map_err(|e| Unreadable(format!("the answer is not JSON: {e}")))?;
        if !value["choices"].is_array() && value.get("error").is_none() {
            return Err(Unreadable("the answer has no `choices`".into()));
        }
        self.take(&value, "message")?;
        self.finished = true;
        Ok(())
    }

    fn take(&mut self, value: &Value, part: &str) -> Result<(), Unreadable> {
        if let Some(error) = value.get("error").filter(|e| !e.is_null()) {
            let message = error["message"].as_str().or_else(|| error.as_str()).unwrap_or("no reason given");
            return Err(Unreadable(format!("the server ended the answer: {message}")));
        }
        self.usage(&value["usage"]);
        let mut prompt = numbers(&value["prompt_token_ids"]);
        let Some(choice) = value["choices"].as_array().and_then(|c| c.first()) else { return Ok(()) };
        if prompt.is_empty() {
            prompt = numbers(&choice["prompt_token_ids"]);
        }
        let completion = numbers(&choice["token_ids"]);
        let logprobs = choice["logprobs"]["content"].as_array().into_iter().flatten();
        let logprobs: Vec<f64> = logprobs.filter_map(|l| l["logprob"].as_f64()).collect();
        if !prompt.is_empty() || !completion.is_empty() {
            let ids = self.reply.token_ids.get_or_insert_default();
            ids.prompt.extend(prompt);
            ids.completion.extend(completion);
            ids.logprobs.extend(logprobs);
        }
        let message = &choice[part];
        if let Some(text) = message["content"].as_str() {
            self.bytes += text.len();
            self.reply.content.push_str(text);
        }
        for field in ["reasoning_content", "reasoning"] {
            // Some servers send the same thoughts under both names.
            let other = self.reply.reasoning.as_ref().is_some_and(|r| r.field != field);
            if let Some(text) = message[field].as_str().filter(|t| !t.is_empty() && !other) {
                self.bytes += text.len();
                let reasoning = self.reply.reasoning.get_or_insert_default();
                field.clone_into(&mut reasoning.field);
                reasoning.text.push_str(text);
            }
        }
        if let Some(text) = message["refusal"].as_str() {
            self.bytes += text.len();
            self.reply.refusal.get_or_insert_default().push_str(text);
        }
        for (place, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            self.call(place, call, part == "delta")?;
        }
        if let Some(word) = choice["finish_reason"].as_str() {
            self.reply.finish = Finish::of(word);
            self.finished = true;
        }
        Ok(())
    }

    fn call(&mut self, place: usize, call: &Value, piece: bool) -> Result<(), Unreadable> {
        let index = call["index"].as_u64().and_then(|i| usize::try_from(i).ok());
        let index = match (piece, index) {
            (true, Some(index)) => index,
            // Servers without an index send whole calls: a new identifier is a new call.
            (true, None) => match call["id"].as_str() {
                Some(id) => self.reply.calls.iter().position(|c| c.id == id).unwrap_or(self.reply.calls.len()),
                None => self.reply.calls.len().saturating_sub(1),
            },
            (false, _) => place,
        };
        if index >= MAX_CALLS {
            return Err(Unreadable(format!("an answer with more than {MAX_CALLS} calls")));
        }
        if self.reply.calls.len() <= index {
            self.reply.calls.resize_with(index + 1, Call::default);
        }
        let Some(known) = self.reply.calls.get_mut(index) else { return Ok(()) };
        if let Some(id) = call["id"].as_str().filter(|id| !id.is_empty()) {
            id.clone_into(&mut known.id);
        }
        if let Some(name) = call["function"]["name"].as_str().filter(|n| !n.is_empty()) {
            // The whole name with every piece, or its pieces one after another: both are seen.
            if known.name != name {
                known.name.push_str(name);
            }
            self.bytes += name.len();
        }
        match &call["function"]["arguments"] {
            Value::String(text) => {
                self.bytes += text.len();
                known.arguments.push_str(text);
            }
            // Some servers give the object itself.
            object @ Value::Object(_) => {
                let text = object.to_string();
                self.bytes += text.len();
                known.arguments = text;
            }
            _ => {}
        }
        Ok(())
    }

    fn usage(&mut self, usage: &Value) {
        let (Some(prompt), completion) = (usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64()) else {
            return;
        };
        self.counted = true;
        self.reply.usage = Usage {
            prompt,
            completion: completion.unwrap_or(0),
            cached: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
            estimated: false,
        };
    }

    /// The answer. `prompt` is what the tokens read are estimated at where the server has not counted; `cut` says
    /// that the rest was given up.
    #[must_use]
    pub fn reply(mut self, prompt: u64, cut: bool) -> Reply {
        if !self.counted {
            self.reply.usage = Usage { prompt, completion: estimate(self.bytes), cached: 0, estimated: true };
        }
        if cut {
            self.reply.cut_at = Some(u64::try_from(self.bytes).unwrap_or(u64::MAX));
        }
        for (i, call) in self.reply.calls.iter_mut().enumerate() {
            if call.id.is_empty() {
                call.id = format!("call_{i}");
            }
        }
        self.reply
    }
}

fn numbers(value: &Value) -> Vec<u32> {
    let list = value.as_array().into_iter().flatten();
    list.filter_map(|n| n.as_u64().and_then(|n| u32::try_from(n).ok())).collect()
}

/// Cuts a stream of bytes into the data of its events.
#[derive(Debug, Default)]
pub struct Events {
    left: Vec<u8>,
}

impl Events {
    /// Adds bytes; gives each line's data to `event`.
    ///
    /// # Errors
    /// What `event` says, or a line that is longer than `most` bytes.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        most: usize,
        mut event: impl FnMut(&str) -> Result<(), Unreadable>,
    ) -> Result<(), Unreadable> {
        self.left.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(end) = self.left.iter().skip(start).position(|b| *b == b'\n').map(|n| start + n) {
            let line = String::from_utf8_lossy(self.left.get(start..end).unwrap_or_default()).into_owned();
            start = end + 1;
            // `event:`, `id:`, comments and blank lines say nothing that is needed here.
            if let Some(data) = line.trim_end_matches('\r').strip_prefix("data:") {
                event(data.trim())?;
            }
        }
        self.left.drain(..start);
        if self.left.len() > most {
            return Err(Unreadable(format!("an event of the stream is longer than {most} bytes")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(lines: &[Value]) -> Result<Reply, Unreadable> {
        let mut assembly = Assembly::default();
        let mut events = Events::default();
        let mut text: String = lines.iter().map(|l| format!("data: {l}\r\n\r\n")).collect();
        text.push_str(": keep-alive\n\ndata: [DONE]\n\n");
        // Cut at every byte, as a network may.
        for byte in text.as_bytes().chunks(1) {
            events.feed(byte, 1 << 16, |data| assembly.event(data))?;
        }
        assert!(assembly.done());
        Ok(assembly.reply(7, false))
    }

    #[test]
    fn a_stream_and_a_whole_body_say_the_same() {
        let piece = |delta: Value| json!({"choices": [{"index": 0, "delta": delta}]});
        let call = |name: &str, id: &str, arguments: &str| json!({"tool_calls": [{"index": 1, "id": id, "function": {"name": name, "arguments": arguments}}]});
        let first = json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "Read", "arguments": "{}"}}]});
        let mut end = piece(json!({}));
        end["choices"][0]["finish_reason"] = json!("tool_calls");
        let usage =
            json!({"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}});
        let streamed = streamed(&[
            piece(json!({"role": "assistant", "content": "I lo"})),
            piece(json!({"content": "ok.", "reasoning_content": "hm"})),
            piece(first),
            piece(call("Bash", "b", "{\"comm")),
            piece(call("", "", "and\": \"ls\"}")),
            end,
            json!({"choices": [], "usage": usage}),
        ])
        .unwrap();
        let mut whole = Assembly::default();
        let body = json!({"choices": [{"message": {"content": "I look.", "reasoning_content": "hm", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "Bash", "arguments": "{\"command\": \"ls\"}"}},
        ]}, "finish_reason": "tool_calls"}], "usage": usage});
        whole.body(body.to_string().as_bytes()).unwrap();
        assert!(whole.finished());
        let whole = whole.reply(7, false);
        assert_eq!(whole, streamed);
        assert_eq!(whole.calls[1].arguments, "{\"command\": \"ls\"}");
        assert_eq!(whole.usage, Usage { prompt: 20, completion: 5, cached: 16, estimated: false });
    }

    #[test]
    fn tokens_that_the_server_does_not_count_are_estimated_and_marked() {
        let reply = streamed(&[json!({"choices": [{"delta": {"content": "x".repeat(33)}, "finish_reason": "stop"}]})]);
        assert_eq!(reply.unwrap().usage, Usage { prompt: 7, completion: 10, cached: 0, estimated: true });
    }

    #[test]
    fn token_ids_are_kept_where_the_server_gives_them() {
        let piece = |ids: Value, logprob: f64| {
            json!({"choices": [{"delta": {"content": "a"}, "token_ids": ids,
                               "logprobs": {"content": [{"token": "a", "logprob": logprob}]}}]})
        };
        let mut first = piece(json!([5]), -0.5);
        first["prompt_token_ids"] = json!([1, 2, 3]);
        let ids = streamed(&[first, piece(json!([6]), -1.0)]).unwrap().token_ids.unwrap();
        assert_eq!(ids, TokenIds { prompt: vec![1, 2, 3], completion: vec![5, 6], logprobs: vec![-0.5, -1.0] });
    }

    #[test]
    fn an_error_in_the_middle_of_a_stream_is_told() {
        let error = streamed(&[json!({"error": {"message": "out of memory", "code": 500}})]).unwrap_err();
        assert_eq!(error.0, "the server ended the answer: out of memory");
        assert!(Assembly::default().body(b"<html>").is_err());
        assert!(Assembly::default().body(b"{\"detail\": \"x\"}").is_err());
    }

    #[test]
    fn a_call_without_index_or_identifier_is_understood() {
        let call = |id: &str, name: &str| {
            json!({"choices": [{"delta": {"tool_calls": [
            {"id": id, "function": {"name": name, "arguments": {"a": 1}}}]}, "finish_reason": "tool_calls"}]})
        };
        let reply = streamed(&[call("x", "Read"), call("y", "Bash")]).unwrap();
        let names: Vec<_> =
            reply.calls.iter().map(|c| (c.id.as_str(), c.name.as_str(), c.arguments.as_str())).collect();
        assert_eq!(names, [("x", "Read", "{\"a\":1}"), ("y", "Bash", "{\"a\":1}")]);
    }

    #[test]
    fn the_body_holds_what_was_asked_and_no_more() {
        let messages = [json!({"role": "user", "content": "hi"})];
        let request = Request {
            model: "m",
            messages: &messages,
            tools: &[],
            sampling: Sampling { temperature: Some(0.5), ..Sampling::default() },
            max_tokens: 100,
        };
        assert_eq!(
            request.body(Dialect::default()),
            json!({"model": "m", "messages": messages, "max_tokens": 100, "temperature": 0.5})
        );
        let body = request.body(Dialect { stream: true, token_ids: true, completion_tokens: true });
        assert_eq!(body["max_completion_tokens"], 100);
        assert_eq!((&body["stream"], &body["return_token_ids"]), (&json!(true), &json!(true)));
    }

    proptest::proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn no_event_makes_the_reader_panic(text in "[\\[\\]{}\":,a-z0-9_ ]{0,80}") {
            let _ = Assembly::default().event(&text);
            let _ = Assembly::default().body(text.as_bytes());
        }
    }
}
