//! TodoWrite.

use super::arguments as a;
use super::{Done, Tools, mistake};

impl Tools {
    pub(super) fn todo(&mut self, arguments: a::TodoWrite) -> Done {
        if arguments.todos.len() > 100 {
            return mistake("a list of over 100 items helps nobody; keep what is next");
        }
        self.todos = arguments.todos;
        let open = self.todos.iter().filter(|t| t.status != a::TodoStatus::Completed).count();
        Ok(format!("the list is kept: {} items, {open} open", self.todos.len()))
    }
}
