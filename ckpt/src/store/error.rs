//! What a store refuses and how it fails; what the system says of a file, sorted by what can be done about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// What can be done about an input or output error: the one place where kinds of the system get code and help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoClass {
    /// Nothing but to try again.
    Failed,
    /// Nothing has that name.
    NotFound,
    /// The user may not.
    Denied,
    /// Disk, quota or the largest size of a file.
    Full,
    /// A file where a folder is needed, a folder or something else where a file is, or links in a circle.
    WrongKind,
    /// A name that the file system does not take.
    BadName,
    /// Something has that name already, or the folder is not empty.
    Exists,
    /// The process or the machine has no memory left.
    NoMemory,
    /// The file system cannot do what is needed.
    Unsupported,
    /// The bytes are not what they should be.
    BadBytes,
}

/// The number by which Linux tells of too many symbolic links; its `ErrorKind` is not stable.
const ELOOP: i32 = 40;

impl IoClass {
    /// The class of an error.
    pub fn of(error: &io::Error) -> IoClass {
        use io::ErrorKind;
        if error.raw_os_error() == Some(ELOOP) {
            return IoClass::WrongKind;
        }
        match error.kind() {
            ErrorKind::NotFound => IoClass::NotFound,
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => IoClass::Denied,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => IoClass::Full,
            ErrorKind::NotADirectory | ErrorKind::IsADirectory => IoClass::WrongKind,
            ErrorKind::InvalidFilename | ErrorKind::InvalidInput | ErrorKind::ArgumentListTooLong => {
                IoClass::BadName
            }
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => IoClass::Exists,
            ErrorKind::OutOfMemory => IoClass::NoMemory,
            ErrorKind::Unsupported
            | ErrorKind::NotSeekable
            | ErrorKind::CrossesDevices
            | ErrorKind::TooManyLinks => IoClass::Unsupported,
            ErrorKind::InvalidData | ErrorKind::UnexpectedEof => IoClass::BadBytes,
            // Busy, interrupted, timed out, the network, a device, and what the system has no kind for.
            _ => IoClass::Failed,
        }
    }

    /// The error's number.
    pub fn code(self) -> &'static str {
        match self {
            IoClass::Failed => "RM1001",
            IoClass::NotFound => "RM1003",
            IoClass::Denied => "RM1004",
            IoClass::Full => "RM1005",
            IoClass::WrongKind => "RM1006",
            IoClass::BadName => "RM1007",
            IoClass::Exists => "RM1008",
            IoClass::NoMemory => "RM1009",
            IoClass::Unsupported => "RM1010",
            IoClass::BadBytes => "RM1011",
        }
    }

    /// How to mend it.
    pub fn help(self) -> &'static str {
        match self {
            IoClass::Failed => "it is safe to run again",
            IoClass::NotFound => "check the path for a typing error",
            IoClass::Denied => "check who owns the folder or file, and whether it may be read or written",
            IoClass::Full => "free some space or raise the quota, then run again; nothing half-written stays",
            IoClass::WrongKind => "give a folder where a folder is needed, and a file where a file is",
            IoClass::BadName => "give a shorter name, or one without odd characters",
            IoClass::Exists => "give another name, or remove what is there",
            IoClass::NoMemory => "free memory, or give the process more of it, then run again",
            IoClass::Unsupported => "use a folder on another file system",
            IoClass::BadBytes => "the file is cut short or of another kind; write it anew",
        }
    }
}

/// What Megatron calls the file that names its latest step.
pub(super) const MEGATRON_TRACKER: &str = "latest_checkpointed_iteration.txt";

/// A location that names no store.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LocationError {
    #[error("there is no folder `{}`", .path.display())]
    NoFolder { path: PathBuf },
    #[error("a file lies where the folder `{}`, or one above it, should be", .path.display())]
    NotAFolder { path: PathBuf },
    #[error("the folder `{}` cannot be used", .path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("`{}` is the folder of a run of Megatron: it has `{MEGATRON_TRACKER}`", .path.display())]
    Megatron { path: PathBuf },
    #[error("`{location}`: no store is called `{scheme}`")]
    Scheme { location: String, scheme: String },
}

impl LocationError {
    pub(super) fn of_io(path: PathBuf, source: io::Error) -> LocationError {
        match source.kind() {
            io::ErrorKind::NotFound => LocationError::NoFolder { path },
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => LocationError::NotAFolder { path },
            _ => LocationError::Folder { path, source },
        }
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            LocationError::NoFolder { .. } => "RM4012",
            LocationError::NotAFolder { .. } => IoClass::WrongKind.code(),
            LocationError::Folder { source, .. } => IoClass::of(source).code(),
            LocationError::Megatron { .. } => "RM7005",
            LocationError::Scheme { .. } => "RM1002",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LocationError::NoFolder { .. } => "check the path for a typing error".to_owned(),
            LocationError::NotAFolder { .. } => "give the folder that holds a run's steps".to_owned(),
            LocationError::Folder { source, .. } => IoClass::of(source).help().to_owned(),
            LocationError::Megatron { .. } => {
                "save to another folder; names of steps would be the same".to_owned()
            }
            LocationError::Scheme { .. } => "give a folder, `file://…` or `memory://`".to_owned(),
        }
    }
}

/// A call to the store that failed.
#[derive(Debug, thiserror::Error)]
pub struct StoreError {
    /// What was done, such as `writing`.
    pub doing: &'static str,
    /// To which object, with the store's name.
    pub object: String,
    /// Bytes that were to be moved, where that is known.
    pub bytes: Option<u64>,
    /// The store's words.
    pub source: Box<object_store::Error>,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.doing, self.object)?;
        if let Some(bytes) = self.bytes {
            write!(f, " ({bytes} bytes)")?;
        }
        write!(f, " failed{}", if self.class() == IoClass::Full { ": no space is left" } else { "" })
    }
}

impl StoreError {
    /// What can be done about it.
    pub fn class(&self) -> IoClass {
        use object_store::Error;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&*self.source);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return IoClass::of(io);
            }
            cause = error.source();
        }
        match *self.source {
            Error::NotFound { .. } => IoClass::NotFound,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => IoClass::Denied,
            Error::AlreadyExists { .. } => IoClass::Exists,
            Error::InvalidPath { .. } => IoClass::BadName,
            Error::NotSupported { .. } | Error::NotImplemented { .. } => IoClass::Unsupported,
            _ => IoClass::Failed,
        }
    }

    /// Whether the object is not there.
    pub fn is_not_found(&self) -> bool {
        self.class() == IoClass::NotFound
    }

    /// Whether an object was to be created that is there already.
    pub(crate) fn is_already_there(&self) -> bool {
        matches!(*self.source, object_store::Error::AlreadyExists { .. })
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        self.class().code()
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        self.class().help().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_running_again_cannot_mend_is_not_called_safe_to_run_again() {
        for (number, class) in [
            (2, IoClass::NotFound),
            (1, IoClass::Denied),
            (13, IoClass::Denied),
            (30, IoClass::Denied),
            (28, IoClass::Full),
            (122, IoClass::Full),
            (27, IoClass::Full),
            (20, IoClass::WrongKind),
            (21, IoClass::WrongKind),
            (40, IoClass::WrongKind),
            (36, IoClass::BadName),
            (22, IoClass::BadName),
            (17, IoClass::Exists),
            (39, IoClass::Exists),
            (12, IoClass::NoMemory),
            (18, IoClass::Unsupported),
            (29, IoClass::Unsupported),
            (31, IoClass::Unsupported),
            (95, IoClass::Unsupported),
            (4, IoClass::Failed),
            (5, IoClass::Failed),
            (16, IoClass::Failed),
            (110, IoClass::Failed),
        ] {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(IoClass::of(&error), class, "{error}");
        }
        assert_eq!(IoClass::of(&io::ErrorKind::InvalidData.into()), IoClass::BadBytes);
    }
}
