//! Density: machines of one saved state until the host's memory or a stated limit ends it, and all
//! of them still answer.

use super::{Context, Found, Known, Restored, Rounds, count};
use crate::agent::Question;
use crate::clock::Clock;
use crate::contender::{Feature, Vm};
use crate::error::Error;
use crate::model::Unit;
use crate::observe;

pub(super) struct Density {
    known: Known,
}

impl Density {
    pub(super) fn new(known: Known) -> Self {
        Self { known }
    }
}

impl Rounds for Density {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let Context { guest, workload, .. } = *context;
        let before = observe::available_mib()?;
        let mut vms: Vec<Box<dyn Vm>> = Vec::new();
        let mut first_ms = Vec::new();
        let ended_by = loop {
            if vms.len() >= usize::try_from(workload.most_vms).unwrap_or(usize::MAX) {
                break "the limit of machines";
            }
            // A machine may use all that it was promised while it is started.
            let needed = u64::from(workload.reserve_mib) + u64::from(guest.memory_mib);
            if observe::available_mib()? < needed {
                break "memory";
            }
            let Restored { mut vm, ms, .. } = context.restored(self.known.best())?;
            vm.settle();
            first_ms.push(ms);
            vms.push(vm);
        };
        // Every one of them, the first ones too, has to have stayed alive.
        for vm in &vms {
            Question::new()?.ask(&**vm, &mut Clock::start())?;
        }
        let number = u64::try_from(vms.len()).unwrap_or(u64::MAX);
        let mut push = |figure: Found| {
            found.push(figure.with("most_vms", workload.most_vms).with("ended_by", ended_by));
        };
        push(Found::new("density_vms", Unit::Count, count(number)));
        for (metric, ms) in
            [("density_first_ms", first_ms.first()), ("density_last_ms", first_ms.last())]
        {
            ms.into_iter().for_each(|&ms| push(Found::ms(metric, ms)));
        }
        if context.contender.lacks(Feature::Memory).is_none() && number > 0 {
            let used = before.saturating_sub(observe::available_mib()?) * 1024;
            push(Found::kib("density_host_kib_per_vm", used / number));
            let (mut pss, mut private) = (0, 0);
            for pid in vms.iter().filter_map(|vm| vm.pid()) {
                let memory = observe::memory(pid, guest.memory_mib)?;
                pss += memory.pss;
                private += memory.private;
            }
            push(Found::kib("density_pss_kib_per_vm", pss / number));
            push(Found::kib("density_private_kib_per_vm", private / number));
        }
        vms.iter_mut().try_for_each(|vm| vm.end())
    }
}
