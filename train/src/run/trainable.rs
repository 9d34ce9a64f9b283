//! What a run trains and goes on from, checked once, before any rank starts.

use crate::config::{Numerics, TrainConfig};
use crate::data::{Blend, Sampler, TokenFileError};
use crate::evaluate::Evaluator;
use crate::resume::{Continuation, DataState, Resume, SavedRun, ValidationState, next_sample};
use crate::run::RunError;
use mesh::{ProcessGroups, ScheduleConfig};

/// A configuration with its tokens and the checkpoint that it goes on from, all of which fit: it can be trained.
pub struct Trainable<'a> {
    config: &'a TrainConfig,
    tokens: &'a Blend,
    sampler: Sampler,
    /// What is read next.
    next: DataState,
    validation: Option<(&'a Blend, Sampler)>,
    from: Option<Continuation<'a>>,
}

impl<'a> Trainable<'a> {
    /// Checks that `config` can be trained on `tokens`, and that the run of `resume` may go on as this one; without one it
    /// starts afresh. Reads the next global batch.
    ///
    /// # Errors
    /// What cannot be trained or resumed, the same for all ranks.
    pub fn new(
        config: &'a TrainConfig,
        tokens: &'a Blend,
        resume: Option<Resume<'a>>,
    ) -> Result<Self, RunError> {
        let continued = resume.as_ref().filter(|resume| resume.selection.counters);
        let continued = continued.map(|resume| resume.source.commit());
        config.check_batches(continued.map_or(0, |commit| commit.run.counters.consumed_train_samples))?;
        let sampler = tokens.sampler(config)?;
        let next = continued.map(|commit| next_sample(commit, &sampler)).transpose()?;
        let data = DataState::new(config, tokens, &sampler, next.unwrap_or(0))?;
        let from = resume.map(|resume| Continuation::new(resume, config, &data)).transpose()?;
        // After the comparison: what differs from the checkpoint's run is what is wrong.
        config.check()?;
        Ok(Trainable { config, tokens, sampler, next: data, validation: None, from })
    }

    /// The same with data for the evaluations that the configuration asks for; without them there are none.
    ///
    /// # Errors
    /// Files without a sample.
    pub fn evaluated_on(mut self, validation: &'a Blend) -> Result<Self, RunError> {
        if let Some(evaluation) = self.config.evaluation {
            let sampler = evaluation.sampler(self.config, validation)?;
            let state = ValidationState::new(self.config, &evaluation, validation, &sampler)?;
            self.next.validation = Some(state);
            self.validation = Some((validation, sampler));
        }
        Ok(self)
    }

    /// What is trained.
    pub fn config(&self) -> &'a TrainConfig {
        self.config
    }

    /// The run that goes on; `None` where there is none, or a new one takes only weights.
    pub fn saved(&self) -> Option<&SavedRun> {
        self.from.as_ref().and_then(Continuation::saved)
    }

    /// What makes the next step another one than the saved run's, although the state is the same.
    pub fn changes(&self) -> Vec<String> {
        let (Some(from), Some(saved)) = (&self.from, self.saved()) else { return Vec::new() };
        let mut changes: Vec<String> = from.differences().iter().map(|d| d.field.to_owned()).collect();
        let (before, now) = (fields(&saved.config.schedule), fields(&self.config.schedule));
        let changed = before.iter().filter(|(name, value)| now.get(*name) != Some(*value));
        let changed: Vec<String> =
            changed.map(|(name, value)| format!("{name} {value} → {}", now[name])).collect();
        if !changed.is_empty() {
            changes.push(format!("schedule ({})", changed.join(", ")));
        }
        if changes.is_empty() && saved.config.batch != self.config.batch {
            changes.push("batch, as the layout takes it,".to_owned());
        }
        // The order of fast sums depends on who has which samples.
        if self.config.numerics == Numerics::Fast && saved.config.parallel != self.config.parallel {
            changes.push("layout (fast numerics)".to_owned());
        }
        changes
    }

    /// That evaluations read something else than those of the run that goes on, if they do: it changes no step, but the losses are not
    /// to be compared.
    pub fn other_validation(&self) -> Option<String> {
        let wanted = self.next.validation.as_ref()?;
        let saved = self.from.as_ref()?.other_validation(wanted)?;
        Some(format!(
            "validation losses from here on are not to be compared with earlier ones: evaluations read {wanted}, and read {saved} before"
        ))
    }

    pub(super) fn tokens(&self) -> &'a Blend {
        self.tokens
    }

    /// The part that the rank behind `groups` takes in evaluations; `None` if there are none.
    pub(super) fn evaluator(&self, groups: &ProcessGroups) -> Option<Evaluator<'a>> {
        let ((tokens, sampler), settings) = (self.validation.as_ref()?, self.config.evaluation?);
        Some(Evaluator::new(self.config, settings, tokens, sampler.clone(), groups))
    }

    pub(super) fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    pub(super) fn from(&self) -> Option<&Continuation<'a>> {
        self.from.as_ref()
    }

    /// What is read next as the run starts.
    pub(super) fn next(&self) -> &DataState {
        &self.next
    }

    /// What a checkpoint after `consumed` samples says about those that are next.
    pub(super) fn data(&self, consumed: u64) -> Result<DataState, TokenFileError> {
        let data = DataState::new(self.config, self.tokens, &self.sampler, consumed)?;
        Ok(DataState { validation: self.next.validation.clone(), ..data })
    }
}

/// The numbers of a schedule by the names that `checkpoint.json` has for them.
fn fields(schedule: &ScheduleConfig) -> serde_json::Map<String, serde_json::Value> {
    match serde_json::to_value(schedule) {
        Ok(serde_json::Value::Object(fields)) => fields,
        other => unreachable!("a struct of plain data, not {other:?}"),
    }
}
