//! How a command ends: finds the code, the help and the exit code in a chain of errors, and prints it.

use crate::output::complain;
use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, SourceCode};
use serde_json::json;
use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use train::backend::cuda::{CompileError, OpenError};
use train::comm::CommError;
use train::comm::threads::{Reason, WorldError};
use train::data::TokenFileError;
use train::parallel::StepError;
use train::resume;
use train::run::RunError;
use train::step::BuildError;

/// A command's own refusal, where no library has an error for it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub(crate) code: &'static str,
    pub(crate) exit: u8,
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
    /// A refused setting: exit 2.
    pub(crate) fn usage(code: &'static str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Refusal { code, exit: 2, message: message.into(), help: help.into(), place: None }
    }
}

/// What scripts and people need to know of an error.
struct Class {
    code: String,
    help: Option<String>,
    exit: u8,
}

/// The class of one error of a chain; none if it is only context.
fn class_of(error: &(dyn Error + 'static)) -> Option<Class> {
    macro_rules! known {
        ($($error:ty => $exit:expr;)*) => {$(
            if let Some(known) = error.downcast_ref::<$error>() {
                let exit: fn(&$error) -> u8 = $exit;
                return Some(Class { code: known.code().into(), help: Some(known.help().into()), exit: exit(known) });
            }
        )*};
    }
    if let Some(run) = error.downcast_ref::<RunError>() {
        return class_of_run(run);
    }
    known! {
        mesh::ParallelError => |_| 2;
        mesh::BatchError => |_| 2;
        train::config::ConfigError => |_| 2;
        train::data::TokenFileError => token_file_exit;
        ckpt::LocationError => ckpt::LocationError::exit_code;
        ckpt::OpenError => ckpt::OpenError::exit_code;
        ckpt::StoreError => ckpt::StoreError::exit_code;
        ckpt::DestinationError => ckpt::DestinationError::exit_code;
        ckpt::LoadPlanError => ckpt::LoadPlanError::exit_code;
        ckpt::LoadError => ckpt::LoadError::exit_code;
        ckpt::SaveError => ckpt::SaveError::exit_code;
        train::resume::ResumeError => resume_exit;
        reshard::LayoutChangeError => reshard::LayoutChangeError::exit_code;
        train::backend::cuda::OpenError => gpu_exit;
    }
    if let Some(refusal) = error.downcast_ref::<Refusal>() {
        return Some(Class {
            code: refusal.code.into(),
            help: Some(refusal.help.clone()),
            exit: refusal.exit,
        });
    }
    if let Some(schedule) = error.downcast_ref::<mesh::ScheduleError>() {
        let help = "check --lr, --min-lr, --train-iters, the --lr-… and the weight decay flags".to_owned();
        return Some(Class { code: schedule.code().into(), help: Some(help), exit: 2 });
    }
    error.downcast_ref::<io::Error>().map(class_of_io)
}

/// The class of a run's failure. Its variants are transparent, so what they hold is not in the chain of causes.
fn class_of_run(error: &RunError) -> Option<Class> {
    let class =
        |code: &str, exit, help: &str| Some(Class { code: code.into(), help: Some(help.into()), exit });
    match error {
        RunError::Config(error) => class_of(error),
        RunError::Schedule(error) => class_of(error),
        RunError::Batch(error) => class_of(error),
        RunError::Resume(error) => class_of(error),
        RunError::Tokens(error) => class_of(error),
        RunError::Save { source, .. } => class_of(source),
        RunError::Observer(error) => class_of(&**error),
        RunError::Build(BuildError::Device(_)) => class(
            "RM8004",
            8,
            "a smaller micro-batch, or more ranks on more devices, need less memory on each",
        ),
        RunError::Build(_) => class("RM2003", 2, "pick a layout that divides the model"),
        RunError::EmptyEpoch(_) => class("RM6003", 2, "use --epoch-tail span or pad, or a smaller batch"),
        RunError::NotFinite { .. } => class(
            "RM3201",
            1,
            "a lower --lr, a longer warm-up or a smaller --clip-grad may help; the last save is intact",
        ),
        RunError::Step(StepError::Comm(error)) | RunError::Comm(error) => {
            class(error.code(), comm_exit(error), error.help())
        }
        RunError::Step(StepError::Backend(_)) => class("RM3203", 70, "the device's words say what failed"),
    }
}

/// A rank that was too slow may be in time the next time; ranks that disagree will again.
fn comm_exit(error: &CommError) -> u8 {
    if matches!(error, CommError::TimedOut { .. }) { 5 } else { 70 }
}

/// A GPU, driver or compiler that is not there is not found; one that fails is a failing device.
fn gpu_exit(error: &OpenError) -> u8 {
    match error {
        OpenError::NoDriver | OpenError::NoGpu { .. } | OpenError::Compile(CompileError::Missing) => 3,
        OpenError::Driver { .. } | OpenError::Compile(CompileError::Refused { .. }) => 70,
    }
}

fn resume_exit(error: &resume::ResumeError) -> u8 {
    use resume::ResumeError;
    match error {
        ResumeError::Differs { .. }
        | ResumeError::MissingStream { .. }
        | ResumeError::Glob(_)
        | ResumeError::Placement(_) => 2,
        ResumeError::Plan(error) => error.exit_code(),
        ResumeError::Read(error) => error.exit_code(),
        ResumeError::Field { .. }
        | ResumeError::Stream(_)
        | ResumeError::StreamShape { .. }
        | ResumeError::Random { .. }
        | ResumeError::Fingerprint { .. } => 6,
        ResumeError::NotStrict { .. } => 1,
        ResumeError::Comm(error) => comm_exit(error),
    }
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
    let (code, exit, message) = match error.first.reason {
        Reason::Error(error) => return error.into(),
        Reason::Panic(message) => ("RM9002", 101, format!("rank {rank} panicked: {message}")),
        Reason::NotStarted(reason) => ("RM3202", 8, format!("rank {rank} got no thread: {reason}")),
        Reason::Silent(error) => ("RM9001", 70, format!("rank {rank}: {error}")),
    };
    let help =
        if exit == 8 { "run with fewer ranks" } else { "this is a fault of the program; please report it" };
    Refusal { exit, ..Refusal::usage(code, message, help) }.into()
}

fn token_file_exit(error: &TokenFileError) -> u8 {
    match error {
        TokenFileError::Io { source, .. } => class_of_io(source).exit,
        TokenFileError::Index { .. } | TokenFileError::Length { .. } | TokenFileError::Id { .. } => 6,
        TokenFileError::TooShort { .. } => 2,
    }
}

/// What the system says of a file, under the numbers that stores use.
fn class_of_io(error: &io::Error) -> Class {
    use io::ErrorKind;
    let (code, exit, help) = match error.kind() {
        ErrorKind::NotFound => ("RM1003", 3, "check the path for a typing error"),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            ("RM1004", 4, "check who owns the file and whether it may be read or written")
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            ("RM1005", 8, "free some space or raise the quota, then run again")
        }
        _ => ("RM1001", 5, "it is safe to run again"),
    };
    Class { code: code.into(), help: Some(help.into()), exit }
}

/// An error as it is shown.
#[derive(Debug)]
struct Report {
    code: String,
    message: String,
    cause: Option<Box<Cause>>,
    help: Option<String>,
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
        complain(json!({"error": {
            "code": report.code,
            "message": report.message,
            "causes": causes,
            "help": report.help,
            "exit": report.exit,
            "retryable": matches!(report.exit, 5 | 75),
        }}));
    } else {
        complain(report.render(std::io::stderr().is_terminal()));
    }
    ExitCode::from(report.exit)
}

/// What clap says of the arguments: help and version on stdout, and a wrong flag on stderr with exit code 2.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // The arguments could not be parsed, so whether JSON is wanted has to be seen in them.
    let as_json = std::env::args_os().any(|arg| arg == "--json");
    if error.use_stderr() && as_json {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        return report(&Refusal::usage("RM6001", message, "`--help` lists the flags").into(), true);
    }
    // Where nobody reads it, there is nobody to tell.
    let _ = error.print();
    ExitCode::from(error.exit_code() as u8)
}

impl Report {
    fn of(error: &anyhow::Error) -> Report {
        let class = error.chain().find_map(class_of).unwrap_or_else(|| Class {
            code: "RM9000".into(),
            help: Some("this is a fault of the program; please report it".into()),
            exit: 70,
        });
        // A cause that its parent's text has already is not said again.
        let mut messages: Vec<String> = Vec::new();
        for cause in error.chain() {
            let text = cause.to_string();
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
        Report { code: class.code, message, cause, help: class.help, exit: class.exit, source }
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
        self.help.as_ref().map(|help| Box::new(help) as _)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.source.as_ref().map(|(source, _)| source as _)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.source.as_ref().map(|(_, label)| Box::new(std::iter::once(label.clone())) as _)
    }
}
