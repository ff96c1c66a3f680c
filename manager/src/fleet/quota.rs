//! How much each tenant may have: sandboxes, running and paused; memory and processors of those
//! that are not paused. What is asked for is reserved before it waits to be started, so that many
//! who ask at once do not get more.

use std::collections::BTreeMap;
use std::ops::Add;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Error, Fleet};
use crate::registry::{Quota, Tenant};
use crate::store::Machine;

/// How much somebody has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    sandboxes: u64,
    memory_mib: u64,
    vcpus: u64,
}

impl Usage {
    /// What a running sandbox takes.
    pub(super) fn running(vcpus: u8, memory_mib: u32) -> Self {
        Self { sandboxes: 1, memory_mib: memory_mib.into(), vcpus: vcpus.into() }
    }

    /// What a running sandbox with such a machine takes.
    pub(super) fn of(machine: &Machine) -> Self {
        Self::running(machine.vcpus, machine.memory_mib)
    }

    /// What is left of it when the sandbox is paused.
    pub(super) fn paused(self) -> Self {
        Self { sandboxes: self.sandboxes, ..Self::default() }
    }

    /// What it takes when it goes on.
    pub(super) fn woken(self) -> Self {
        Self { sandboxes: 0, ..self }
    }

    /// The first limit that it exceeds with something more. What is not asked for more of is not
    /// looked at: a limit may have been lowered since.
    fn exceeds_with(self, more: Self, quota: &Quota) -> Option<Error> {
        let all = self + more;
        let limits = [
            ("sandboxes", more.sandboxes, all.sandboxes, quota.sandboxes),
            ("MiB of memory", more.memory_mib, all.memory_mib, quota.memory_mib),
            ("vCPUs", more.vcpus, all.vcpus, quota.vcpus),
        ];
        limits.into_iter().find_map(|(what, more, all, limit)| {
            let limit = limit.filter(|limit| more > 0 && all > *limit)?;
            Some(Error::Quota { what, limit })
        })
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(other.sandboxes),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
            vcpus: self.vcpus.saturating_add(other.vcpus),
        }
    }
}

/// What was reserved and is not there yet.
#[derive(Debug, Default)]
pub(super) struct Reserved(Mutex<BTreeMap<Tenant, Vec<Usage>>>);

/// A tenant's claim to something, until it is there or this is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    reserved: Arc<Reserved>,
    tenant: Tenant,
    pub(super) usage: Usage,
}

impl Reserved {
    fn of(&self, tenant: &Tenant) -> Usage {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = all.get(tenant).into_iter().flatten();
        own.fold(Usage::default(), |sum, usage| sum + *usage)
    }

    fn add(self: &Arc<Self>, tenant: &Tenant, usage: Usage) -> Reservation {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(tenant.clone()).or_default().push(usage);
        Reservation { reserved: Arc::clone(self), tenant: tenant.clone(), usage }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut all = self.reserved.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(own) = all.get_mut(&self.tenant) else { return };
        if let Some(at) = own.iter().position(|usage| *usage == self.usage) {
            own.swap_remove(at);
        }
        if own.is_empty() {
            all.remove(&self.tenant);
        }
    }
}

impl Fleet {
    /// Reserves something for a tenant.
    ///
    /// # Errors
    /// [`Error::Quota`], or the registry's.
    pub(super) fn reserve(&self, tenant: &Tenant, usage: Usage) -> Result<Reservation, Error> {
        let quota = self.registry.quota_of(tenant)?.unwrap_or_default();
        let own = u64::try_from(self.settings.max_per_tenant).unwrap_or(u64::MAX);
        let quota = Quota { sandboxes: quota.sandboxes.or(Some(own)), ..quota };
        // What is there and what is reserved is looked at under one lock, as one becomes the other.
        let members = self.members();
        let own = members.values().filter(|member| member.is_of(tenant));
        let there = own.fold(Usage::default(), |sum, member| sum + member.usage());
        match (there + self.reserved.of(tenant)).exceeds_with(usage, &quota) {
            Some(error) => {
                self.refused("quota").inc();
                Err(error)
            }
            None => Ok(self.reserved.add(tenant, usage)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::stub::{fleet, row};
    use crate::registry::{Row, State};

    /// What waits counts as what is there, and what becomes there counts once.
    #[test]
    fn those_that_ask_at_once_get_no_more_than_their_tenant_may_have() {
        let (_dir, fleet) = fleet(3);
        let [one, other] = ["one", "other"].map(|name| Tenant::new(name).unwrap());
        let usage = Usage::running(1, 128);
        let mut reserved: Vec<_> = (0..3).map(|_| fleet.reserve(&one, usage).unwrap()).collect();
        let refused = || fleet.reserve(&one, usage).map(drop);
        assert!(matches!(refused(), Err(Error::Quota { limit: 3, .. })));
        fleet.reserve(&other, usage).unwrap();
        let member = fleet.announce(&row(&one), reserved.pop().unwrap()).unwrap();
        assert!(matches!(refused(), Err(Error::Quota { limit: 3, .. })));
        // One that goes on takes memory, and its place among the sandboxes already.
        fleet.reserve(&one, member.usage_when_woken()).unwrap();
        drop(reserved);
        let left: Vec<_> = (0..2).map(|_| fleet.reserve(&one, usage).unwrap()).collect();
        assert!(matches!(refused(), Err(Error::Quota { limit: 3, .. })));
        drop(left);
        fleet.registry.set_quota(&one, Quota { vcpus: Some(2), ..Quota::default() }).unwrap();
        let second = fleet.reserve(&one, usage).unwrap();
        assert!(matches!(refused(), Err(Error::Quota { what: "vCPUs", limit: 2 })));
        drop(second);
        member.set_row(Row { state: State::Paused, ..member.row() });
        let two = [fleet.reserve(&one, usage), fleet.reserve(&one, usage)];
        assert!(two.iter().all(Result::is_ok), "{two:?}");
    }

    #[test]
    fn a_paused_sandbox_counts_but_its_memory_does_not() {
        let running = Usage::running(2, 512);
        assert_eq!(running.paused() + running.woken(), running);
        let quota = Quota { sandboxes: Some(2), memory_mib: Some(1000), vcpus: None };
        assert!(running.paused().exceeds_with(running, &quota).is_none());
        let error = running.exceeds_with(running, &quota).unwrap();
        assert!(matches!(error, Error::Quota { what: "MiB of memory", limit: 1000 }), "{error}");
        let three = running.paused() + running.paused() + running.paused();
        let error = three.exceeds_with(running, &quota).unwrap();
        assert!(matches!(error, Error::Quota { what: "sandboxes", limit: 2 }), "{error}");
        // It goes on although there are more by now than there may be.
        assert!(three.exceeds_with(running.woken(), &quota).is_none());
    }

    #[test]
    fn what_is_not_needed_any_more_is_free_again() {
        let reserved = Arc::new(Reserved::default());
        let tenant = Tenant::new("a").unwrap();
        let first = reserved.add(&tenant, Usage::running(1, 2));
        let second = reserved.add(&tenant, Usage::running(3, 4));
        assert_eq!(reserved.of(&tenant), Usage { sandboxes: 2, memory_mib: 6, vcpus: 4 });
        drop(first);
        assert_eq!(reserved.of(&tenant), second.usage);
        drop(second);
        assert!(reserved.0.lock().unwrap().is_empty());
    }
}
