//! Completions of token ids: a policy server reads and writes tokens, and none is encoded twice on the way. Pure.
//!
//! Knows the protocol. Must not know connections, nor what the tokens mean.

use serde_json::{Value, json};

use super::chat::{Finish, Sampling, Unreadable};
use super::tokens::Usage;

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub model: &'a str,
    pub prompt: &'a [u32],
    pub sampling: Sampling,
    pub max_tokens: u64,
}

/// What the server drew.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub text: String,
    pub token_ids: Vec<u32>,
    /// One a token.
    pub logprobs: Vec<f64>,
    pub finish: Finish,
    pub usage: Usage,
}

impl Request<'_> {
    /// The body to send. `logprobs: 0` asks for those of the drawn tokens alone.
    #[must_use]
    pub fn body(&self) -> Value {
        let mut body = json!({
            "model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens,
            "logprobs": 0, "return_token_ids": true,
        });
        if let Some(temperature) = self.sampling.temperature {
            body["temperature"] = json!(temperature);
        }
        if let Some(top_p) = self.sampling.top_p {
            body["top_p"] = json!(top_p);
        }
        if let Some(seed) = self.sampling.seed {
            body["seed"] = json!(seed);
        }
        body
    }
}

/// Reads an answer.
///
/// # Errors
/// When it holds no token ids, or not one log-probability for each: a policy can't be trained on that.
pub fn read(body: &[u8], prompt: usize) -> Result<Completion, Unreadable> {
    let value: Value = serde_json::from_slice(body).map_err(|e| Unreadable(format!("the answer is not JSON: {e}")))?;
    let Some(choice) = value["choices"].as_array().and_then(|c| c.first()) else {
        return Err(Unreadable("the answer has no `choices`".into()));
    };
    let Some(ids) = choice["token_ids"].as_array() else {
        return Err(Unreadable("the server gives no token ids (`token_ids`); they are needed here".into()));
    };
    let token_ids: Option<Vec<u32>> = ids.iter().map(|n| n.as_u64().and_then(|n| u32::try_from(n).ok())).collect();
    let token_ids = token_ids.ok_or_else(|| Unreadable("`token_ids` holds what is no token".into()))?;
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
    let logprobs: Vec<f64> = logprobs.filter_map(Value::as_f64).collect();
    if logprobs.len() != token_ids.len() {
        return Err(Unreadable(format!("{} log-probabilities for {} tokens", logprobs.len(), token_ids.len())));
    }
    let finish = if choice["finish_reason"] == "length" { Finish::Length } else { Finish::Stop };
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    Ok(Completion {
        text: choice["text"].as_str().unwrap_or_default().to_owned(),
        usage: Usage { prompt: count(prompt), completion: count(token_ids.len()), cached: 0, estimated: false },
        token_ids,
        logprobs,
        finish,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_they_were_drawn() {
        let body = json!({"choices": [{"text": "ab", "token_ids": [4, 9], "finish_reason": "length",
                                      "logprobs": {"token_logprobs": [-0.1, -2.0]}}]});
        let read = read(body.to_string().as_bytes(), 3).unwrap();
        assert_eq!((read.token_ids, read.logprobs, read.finish), (vec![4, 9], vec![-0.1, -2.0], Finish::Length));
        assert_eq!((read.usage.prompt, read.usage.completion), (3, 2));
    }

    #[test]
    fn an_answer_that_a_policy_cannot_learn_from_is_refused() {
        for (body, says) in [
            (json!({"choices": [{"text": "ab"}]}), "gives no token ids"),
            (json!({"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.1]}}]}), "1 log-prob"),
            (json!({"choices": [{"token_ids": [-1]}]}), "no token"),
            (json!({}), "no `choices`"),
        ] {
            let error = read(body.to_string().as_bytes(), 1).unwrap_err();
            assert!(error.0.contains(says), "{error:?}");
        }
    }
}
