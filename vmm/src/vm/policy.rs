//! Which request is legal in which state: a pure function, so that it can be tested over every
//! sequence of requests.

use coppice_vmm_protocol::{Op, VmState};
use thiserror::Error;

/// A request as the policy sees it: what it does, without its details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make what a machine will need.
    Prepare,
    /// Build the machine.
    Create,
    /// Run it for the first time.
    Start,
    /// Stop vCPUs and devices.
    Pause,
    /// Run it again.
    Resume,
    /// Write a checkpoint of it.
    Checkpoint,
    /// Let it stand on the checkpoint that was written.
    Commit,
    /// Bring it back to a checkpoint.
    Rollback,
    /// Write down which pages it has used.
    RecordWorkingSet,
    /// End it.
    Stop,
    /// Look at it.
    Status,
    /// Change the balloon's target.
    SetBalloon,
}

impl From<&Op> for Action {
    fn from(op: &Op) -> Self {
        match op {
            Op::Prepare { .. } => Self::Prepare,
            Op::Create(_) => Self::Create,
            Op::Start {} => Self::Start,
            Op::Pause {} => Self::Pause,
            Op::Resume {} => Self::Resume,
            Op::Checkpoint(_) => Self::Checkpoint,
            Op::Commit { .. } => Self::Commit,
            Op::Rollback(_) => Self::Rollback,
            Op::RecordWorkingSet { .. } => Self::RecordWorkingSet,
            Op::Stop {} => Self::Stop,
            Op::Status {} => Self::Status,
            Op::SetBalloon { .. } => Self::SetBalloon,
        }
    }
}

/// A request that is not legal now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Illegal {
    /// The machine is in a state in which it makes no sense.
    #[error(
        "{action:?} is not possible for a machine that {}; {}", describe(*.state), remedy(*.state)
    )]
    State {
        /// What was asked for.
        action: Action,
        /// The state it was asked in.
        state: VmState,
    },
    /// A checkpoint is being written.
    #[error("{0:?} is not possible while a checkpoint is being written; wait until it is done")]
    Writing(Action),
    /// No checkpoint waits to be committed.
    #[error("there is no checkpoint to commit")]
    NothingWritten,
}

fn describe(state: VmState) -> &'static str {
    match state {
        VmState::Empty | VmState::Prepared => "was not created yet",
        VmState::Created => "was created but not started",
        VmState::Running => "is running",
        VmState::Paused => "is paused",
        VmState::Exited => "has ended",
    }
}

fn remedy(state: VmState) -> &'static str {
    match state {
        VmState::Empty | VmState::Prepared => "create it first",
        VmState::Created => "start or stop it first",
        VmState::Running => "pause or stop it first",
        VmState::Paused => "resume or stop it first",
        VmState::Exited => "make a new one",
    }
}

/// How far a checkpoint of the machine has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// There is none under way.
    None,
    /// It is being written.
    Writing,
    /// It is written and waits to be committed.
    Written,
}

/// The state a machine is in once `action` has succeeded in `state`, with a checkpoint of it as
/// far as `progress` says.
///
/// # Errors
/// [`Illegal`] when the action is not possible then.
pub fn next(state: VmState, progress: Progress, action: Action) -> Result<VmState, Illegal> {
    use VmState::{Created, Empty, Exited, Paused, Prepared, Running};
    match (progress, action) {
        (Progress::Writing, Action::Checkpoint | Action::Rollback | Action::Commit)
        | (Progress::Written, Action::Checkpoint | Action::Rollback) => {
            return Err(Illegal::Writing(action));
        }
        (Progress::None, Action::Commit) => return Err(Illegal::NothingWritten),
        _ => {}
    }
    match (state, action) {
        (_, Action::Status) => Ok(state),
        (Exited, _) => Err(Illegal::State { action, state }),
        (Empty, Action::Prepare) => Ok(Prepared),
        (Empty | Prepared, Action::Create) => Ok(Created),
        (Running | Paused, Action::Checkpoint | Action::Commit | Action::Rollback) => Ok(state),
        (Created, Action::Start) | (Paused, Action::Resume) => Ok(Running),
        (Running, Action::Pause) => Ok(Paused),
        (_, Action::Stop) => Ok(Exited),
        (Running | Paused, Action::RecordWorkingSet) => Ok(state),
        (Created | Running | Paused, Action::SetBalloon) => Ok(state),
        (Empty | Prepared | Created | Running | Paused, _) => Err(Illegal::State { action, state }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    const ACTIONS: [Action; 12] = [
        Action::RecordWorkingSet,
        Action::Commit,
        Action::Prepare,
        Action::Checkpoint,
        Action::Rollback,
        Action::Create,
        Action::Start,
        Action::Pause,
        Action::Resume,
        Action::Stop,
        Action::Status,
        Action::SetBalloon,
    ];

    /// Follows a sequence of actions from the beginning; refused ones change nothing.
    fn follow(actions: &[Action]) -> Vec<(Action, bool, VmState)> {
        let mut state = VmState::Empty;
        let mut steps = Vec::new();
        for action in actions {
            let result = next(state, Progress::None, *action);
            state = result.unwrap_or(state);
            steps.push((*action, result.is_ok(), state));
        }
        steps
    }

    proptest! {
        #[test]
        fn vcpus_run_only_between_a_start_or_resume_and_the_next_pause_or_stop(
            actions in proptest::collection::vec(select(&ACTIONS[..]), 0..40),
        ) {
            let mut running = false;
            for (action, accepted, state) in follow(&actions) {
                if accepted {
                    match action {
                        Action::Start | Action::Resume => {
                            prop_assert!(!running);
                            running = true;
                        }
                        Action::Pause => {
                            prop_assert!(running);
                            running = false;
                        }
                        Action::Stop => running = false,
                        Action::Checkpoint
                        | Action::Commit
                        | Action::Rollback
                        | Action::RecordWorkingSet => {
                            prop_assert!(matches!(state, VmState::Running | VmState::Paused));
                        }
                        Action::Prepare
                        | Action::Create
                        | Action::Status
                        | Action::SetBalloon => {}
                    }
                }
                prop_assert_eq!(state == VmState::Running, running);
            }
        }

        #[test]
        fn create_start_and_stop_each_happen_at_most_once(
            actions in proptest::collection::vec(select(&ACTIONS[..]), 0..60),
        ) {
            let steps = follow(&actions);
            for once in [Action::Prepare, Action::Create, Action::Start, Action::Stop] {
                let count = steps.iter().filter(|(a, ok, _)| *a == once && *ok).count();
                prop_assert!(count <= 1, "{:?} was accepted {} times", once, count);
            }
        }

        #[test]
        fn nothing_but_status_is_accepted_after_the_end(
            actions in proptest::collection::vec(select(&ACTIONS[..]), 0..40),
        ) {
            let mut ended = false;
            for (action, accepted, state) in follow(&actions) {
                if ended {
                    prop_assert_eq!(accepted, action == Action::Status);
                }
                ended |= state == VmState::Exited;
            }
        }

        #[test]
        fn a_machine_that_has_not_ended_can_be_stopped(
            actions in proptest::collection::vec(select(&ACTIONS[..]), 0..40),
        ) {
            let state = follow(&actions).last().map_or(VmState::Empty, |step| step.2);
            prop_assert_eq!(next(state, Progress::None, Action::Stop).is_ok(), state != VmState::Exited);
        }
    }

    #[test]
    fn one_checkpoint_at_a_time_and_no_rollback_meanwhile() {
        for action in ACTIONS {
            for progress in [Progress::Writing, Progress::Written] {
                let refused =
                    next(VmState::Running, progress, action) == Err(Illegal::Writing(action));
                let commit = action == Action::Commit && progress == Progress::Writing;
                let expected = commit || matches!(action, Action::Checkpoint | Action::Rollback);
                assert_eq!(refused, expected, "{action:?} {progress:?}");
            }
        }
    }

    #[test]
    fn the_refusal_names_the_state_and_the_remedy() {
        let text = next(VmState::Paused, Progress::None, Action::Start).unwrap_err().to_string();
        assert_eq!(
            text,
            "Start is not possible for a machine that is paused; resume or stop it first"
        );
    }
}
