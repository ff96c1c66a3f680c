//! Boots: from exec of the VMM to the guest's init, with what the VMM takes then; and to the first
//! output of a command, which the agent runs.

use super::{Context, Found, Rounds, count};
use crate::agent::{Question, token};
use crate::clock::Clock;
use crate::contender::{Boot, Feature};
use crate::error::Error;
use crate::model::Unit;
use crate::observe;

/// Nothing is kept from boot to boot.
pub(super) struct Boots;

impl Rounds for Boots {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        to_init(context, found)?;
        if context.contender.lacks(Feature::Save).is_none() {
            to_first_output(context, found)?;
        }
        Ok(())
    }
}

fn to_init(context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
    let Context { contender, guest, .. } = *context;
    let place = contender.place(guest, None)?;
    let token = token()?;
    context.chill(None)?;
    let mut clock = Clock::start();
    let mut vm = contender.boot_to_console(guest, &token, place, &mut clock)?;
    vm.wait_for_line(&token)?;
    let ms = clock.mark("init");
    let pid = vm.pid();
    found.push(Found::timed("boot_ms", ms, clock));
    if let Some(exits) = pid.and_then(observe::kvm_exits) {
        found.push(Found::new("boot_kvm_exits", Unit::Count, count(exits)));
    }
    if let Some(pid) = pid {
        let memory = observe::memory(pid, guest.memory_mib)?;
        found.push(Found::kib("overhead_pss_kib", memory.overhead_pss));
        found.push(Found::kib("boot_guest_rss_kib", memory.guest_rss));
    }
    vm.end()
}

fn to_first_output(context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
    let Context { contender, guest, .. } = *context;
    let place = contender.place(guest, None)?;
    let question = Question::new()?;
    context.chill(None)?;
    let mut clock = Clock::start();
    let mut vm = contender.boot(guest, Boot { place, diff: false }, &mut clock)?;
    let ms = question.ask(&*vm, &mut clock)?;
    found.push(Found::timed("boot_first_output_ms", ms, clock));
    vm.end()
}
