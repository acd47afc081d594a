//! Why a command failed, whose fault it was, and the exit code that says so.
//!
//! | exit code | whose fault                                                                             |
//! | --------- | --------------------------------------------------------------------------------------- |
//! | 2         | the user's: a key, a path, a file that holds something else; nothing was started          |
//! | 3         | the machine's, or of a run that went wrong: a full or failing disk, a folder that is closed |
//! | 128 + n   | nobody's: signal n                                                                       |
//!
//! [`evenkeel_store::Error::is_fault`] tells the first two apart for files.

use std::process::ExitCode;

const EXIT_MISTAKE: u8 = 2;
pub const EXIT_FAULT: u8 = 3;

/// A message, and a hint at what to do about it.
#[derive(Debug, PartialEq)]
pub struct Mistake {
    pub what: String,
    pub hint: Option<String>,
}

/// All of a user's mistakes that could be found at once.
#[derive(Debug, PartialEq)]
pub struct Mistakes(pub Vec<Mistake>);

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The user's; nothing was started.
    Mistakes(Mistakes),
    /// The machine's, or of a run that went wrong.
    Fault(Mistake),
    /// A signal's.
    Interrupted { mistake: Mistake, code: u8 },
}

impl Failure {
    pub fn new(is_fault: bool, what: String, hint: Option<String>) -> Failure {
        let mistake = Mistake { what, hint };
        if is_fault { Failure::Fault(mistake) } else { mistake.into() }
    }

    /// An error that the user did not cause.
    pub fn fault(error: impl std::fmt::Display) -> Failure {
        Failure::new(true, error.to_string(), None)
    }

    /// All messages for the user.
    pub fn mistakes(&self) -> &[Mistake] {
        match self {
            Failure::Mistakes(Mistakes(mistakes)) => mistakes,
            Failure::Fault(mistake) | Failure::Interrupted { mistake, .. } => std::slice::from_ref(mistake),
        }
    }

    /// Prints the messages and returns the exit code.
    pub fn report(self) -> ExitCode {
        let code = match self {
            Failure::Mistakes(_) => EXIT_MISTAKE,
            Failure::Fault(_) => EXIT_FAULT,
            Failure::Interrupted { code, .. } => code,
        };
        for Mistake { what, hint } in self.mistakes() {
            eprintln!("error: {what}");
            if let Some(hint) = hint {
                eprintln!("  hint: {hint}");
            }
        }
        ExitCode::from(code)
    }
}

/// Warns of something that may not be as the user thinks.
pub fn warn(what: &str) {
    eprintln!("warning: {what}");
}

impl From<Vec<Mistake>> for Mistakes {
    fn from(mistakes: Vec<Mistake>) -> Mistakes {
        Mistakes(mistakes)
    }
}

impl From<Mistake> for Mistakes {
    fn from(mistake: Mistake) -> Mistakes {
        Mistakes(vec![mistake])
    }
}

impl<M: Into<Mistakes>> From<M> for Failure {
    fn from(mistakes: M) -> Failure {
        Failure::Mistakes(mistakes.into())
    }
}

impl From<evenkeel_store::Error> for Failure {
    fn from(error: evenkeel_store::Error) -> Failure {
        Failure::new(error.is_fault(), error.to_string(), error.hint().map(str::to_owned))
    }
}

impl From<evenkeel_model::Error> for Failure {
    fn from(error: evenkeel_model::Error) -> Failure {
        let is_fault = matches!(&error, evenkeel_model::Error::Store(error) if error.is_fault());
        Failure::new(is_fault, error.to_string(), error.hint())
    }
}

impl From<evenkeel_data::Error> for Failure {
    fn from(error: evenkeel_data::Error) -> Failure {
        Failure::new(error.is_fault(), error.to_string(), error.hint())
    }
}

impl From<evenkeel_train::Error> for Failure {
    fn from(error: evenkeel_train::Error) -> Failure {
        Failure::new(error.is_fault(), error.to_string(), error.hint())
    }
}

impl From<evenkeel_comm::RankFailure> for Failure {
    fn from(failure: evenkeel_comm::RankFailure) -> Failure {
        evenkeel_train::Error::from(failure).into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error as IoError, ErrorKind};
    use std::path::PathBuf;

    use evenkeel_store::{Defect, Error};

    use super::*;

    #[test]
    fn what_the_machine_does_wrong_is_no_mistake_of_the_user_wherever_it_shows() {
        type Case = (fn() -> Defect, bool);
        let cases: [Case; 9] = [
            (|| Defect::Io(IoError::from_raw_os_error(5)), true),
            (|| Defect::Io(ErrorKind::PermissionDenied.into()), false),
            (|| Defect::CannotBeWritten(IoError::from_raw_os_error(5)), true),
            (|| Defect::MayNotBeWritten(ErrorKind::PermissionDenied.into()), true),
            (|| Defect::NoSpaceLeft, true),
            (|| Defect::QuotaUsedUp, true),
            (|| Defect::Missing, false),
            (|| Defect::NotThere, false),
            (|| Defect::InTheWay, false),
        ];
        for (defect, is_fault) in cases {
            let error = || Error { file: PathBuf::from("x"), defect: defect() };
            let of_data = || evenkeel_data::Error::from(error());
            let failures: [Failure; 5] = [
                error().into(),
                evenkeel_model::Error::from(error()).into(),
                of_data().into(),
                evenkeel_train::Error::from(error()).into(),
                evenkeel_train::Error::from(of_data()).into(),
            ];
            for failure in failures {
                assert_eq!(matches!(failure, Failure::Fault(_)), is_fault, "{failure:?}");
            }
        }
    }
}
