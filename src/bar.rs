//! A bar on a terminal for what takes long; where nobody looks, in a pipe or with `--json` or `--quiet`, there is none.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// Progress in bytes, drawn on stderr until it is dropped.
#[derive(Debug)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar labelled `what` that is full after `total` bytes; with `None` it only counts. `is_wanted`: see
    /// [`Output::bar`](crate::output::Output::bar).
    pub(crate) fn new(what: &'static str, total: Option<u64>, is_wanted: bool) -> Self {
        // Stderr that is no terminal is drawn on by nobody.
        let target = if is_wanted { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(total, target);
        let template = match total {
            Some(_) => "{prefix:>12} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  eta {eta}",
            None => "{prefix:>12} {spinner} {bytes}  {bytes_per_sec}",
        };
        bar.set_style(ProgressStyle::with_template(template).expect("the template is one"));
        bar.set_prefix(what);
        bar.tick();
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar(bar)
    }

    /// Some more bytes are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
