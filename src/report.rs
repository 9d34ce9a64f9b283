//! How a command ends: finds code and help in a chain of errors, the exit code in the table of codes, and prints it.

pub(crate) mod codes;

use crate::output::{complain_for_oneself, lines};
use ckpt::IoClass;
use codes::UNKNOWN;
use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, SourceCode};
use serde_json::json;
use std::error::Error;
use std::fmt;
use std::io::IsTerminal;
use std::process::ExitCode;
use train::comm::threads::{Reason, WorldError};
use train::resume;
use train::run::RunError;

/// A command's own refusal, where no library has an error for it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) help: String,
    /// The place in a text that is to blame.
    pub(crate) place: Option<Box<Place>>,
}

/// A part of a file.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) file: String,
    pub(crate) text: String,
    pub(crate) span: std::ops::Range<usize>,
    pub(crate) label: String,
}

impl Refusal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Refusal { code, message: message.into(), help: help.into(), place: None }
    }
}

/// Code and help of one error of a chain; none if it is only context.
fn told_by(error: &(dyn Error + 'static)) -> Option<(String, String)> {
    macro_rules! known {
        ($($error:ty)*) => {$(
            if let Some(known) = error.downcast_ref::<$error>() {
                return Some((known.code().into(), known.help().into()));
            }
        )*};
    }
    if let Some(RunError::Observer(error)) = error.downcast_ref() {
        return told_by(&**error);
    }
    known! {
        mesh::ParallelError
        mesh::BatchError
        mesh::GroupOptionsError
        mesh::LayoutError
        mesh::ScheduleError
        ckpt::LocationError
        ckpt::OpenError
        ckpt::StoreError
        ckpt::DestinationError
        ckpt::LoadPlanError
        ckpt::LoadError
        ckpt::SavePlanError
        ckpt::SaveError
        ckpt::SafetensorsError
        ckpt::ForeignError
        mesh::PipelineError
        reshard::HfConfigError
        reshard::LayoutChangeError
        reshard::UndividedTensor
        train::backend::BackendError
        train::backend::cuda::OpenError
        train::comm::CommError
        train::comm::processes::LaunchError
        train::config::ConfigError
        train::data::TokenFileError
        train::data::DataPathError
        train::data::sampler::SamplerError
        train::parallel::StepError
        train::resume::ResumeError
        train::run::RunError
        train::step::BuildError
    }
    if let Some(refusal) = error.downcast_ref::<Refusal>() {
        return Some((refusal.code.into(), refusal.help.clone()));
    }
    let class = IoClass::of(error.downcast_ref()?);
    Some((class.code().into(), class.help().into()))
}

/// Whether a checkpoint is damaged, not absent or out of reach: another one may be taken instead.
pub(crate) fn is_damage(error: &anyhow::Error) -> bool {
    use resume::ResumeError;
    error.chain().any(|cause| match cause.downcast_ref::<RunError>() {
        Some(RunError::Resume(ResumeError::Read(error))) => error.is_damage(),
        Some(RunError::Resume(ResumeError::Fingerprint { .. } | ResumeError::Stream(_))) => true,
        _ => cause.downcast_ref::<ckpt::OpenError>().is_some_and(ckpt::OpenError::is_damage),
    })
}

/// The first rank's failure as an error.
pub(crate) fn failure(error: WorldError<RunError>) -> anyhow::Error {
    let rank = error.first.rank;
    let bug = "this is a fault of the program; please report it";
    let (code, message, help) = match error.first.reason {
        Reason::Error(error) => return error.into(),
        Reason::Panic(message) => ("RM9002", format!("rank {rank} panicked: {message}"), bug),
        Reason::NotStarted(reason) => {
            ("RM3202", format!("rank {rank} got no thread: {reason}"), "run with fewer ranks")
        }
        Reason::NotJoined(error) => return error.into(),
        Reason::Elsewhere(error) => return error.into(),
        Reason::Silent(error) => ("RM9001", format!("rank {rank}: {error}"), bug),
    };
    Refusal::new(code, message, help).into()
}

/// An error as it is shown.
#[derive(Debug)]
struct Report {
    code: String,
    message: String,
    cause: Option<Box<Cause>>,
    help: String,
    exit: u8,
    source: Option<(NamedSource<String>, LabeledSpan)>,
}

#[derive(Debug)]
struct Cause {
    message: String,
    cause: Option<Box<Cause>>,
}

/// Prints `error` on stderr and returns the exit code.
pub(crate) fn report(error: &anyhow::Error, as_json: bool) -> ExitCode {
    let report = Report::of(error);
    if as_json {
        let causes: Vec<String> = std::iter::successors(report.cause.as_deref(), |c| c.cause.as_deref())
            .map(|cause| cause.message.clone())
            .collect();
        complain_for_oneself(json!({"error": {
            "code": report.code,
            "message": report.message,
            "causes": causes,
            "help": report.help,
            "exit": report.exit,
            "retryable": matches!(report.exit, 5 | 75),
        }}));
    } else {
        complain_for_oneself(report.render(std::io::stderr().is_terminal()));
    }
    ExitCode::from(report.exit)
}

/// The exit code of `error`, for a process that leaves it to another one to print it.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(Report::of(error).exit)
}

/// What clap says of the arguments: help and version on stdout, and a wrong flag on stderr with exit code 2.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // The arguments could not be parsed, so whether JSON is wanted has to be seen in them.
    let as_json = std::env::args_os().any(|arg| arg == "--json");
    if error.use_stderr() && as_json {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        return report(&Refusal::new("RM6001", message, "`--help` lists the flags").into(), true);
    }
    // Where nobody reads it, there is nobody to tell.
    let _ = error.print();
    ExitCode::from(error.exit_code() as u8)
}

impl Report {
    fn of(error: &anyhow::Error) -> Report {
        let unknown = || (UNKNOWN.to_owned(), "this is a fault of the program; please report it".to_owned());
        let (code, help) = error.chain().find_map(told_by).unwrap_or_else(unknown);
        let exit = codes::find(&code).expect("a test compares the table with all codes").exit;
        // A cause that its parent's text has already is not said again.
        let mut messages: Vec<String> = Vec::new();
        for cause in error.chain() {
            let text = lines(&cause.to_string());
            if !messages.last().is_some_and(|last| last.contains(&text)) {
                messages.push(text);
            }
        }
        let mut messages = messages.into_iter();
        let message = messages.next().expect("a chain has its head");
        let cause = messages.rev().fold(None, |cause, message| Some(Box::new(Cause { message, cause })));
        let place = error.chain().find_map(|cause| cause.downcast_ref::<Refusal>()?.place.as_deref());
        let source = place.map(|place| {
            let label = LabeledSpan::new_with_span(Some(place.label.clone()), place.span.clone());
            (NamedSource::new(&place.file, place.text.clone()), label)
        });
        Report { code, message, cause, help, exit, source }
    }

    fn render(&self, is_terminal: bool) -> String {
        // Off a terminal lines stay whole, so that they can be searched.
        let handler = match is_terminal {
            true => GraphicalReportHandler::new(),
            false => GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor()).with_width(10_000),
        };
        let mut text = String::from("Error: ");
        match handler.render_report(&mut text, self) {
            Ok(()) => text.trim_end().to_owned(),
            Err(fmt::Error) => format!("Error: {}: {}", self.code, self.message),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Report {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

impl Diagnostic for Report {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(&self.code))
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(&self.help))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.source.as_ref().map(|(source, _)| source as _)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.source.as_ref().map(|(_, label)| Box::new(std::iter::once(label.clone())) as _)
    }
}
