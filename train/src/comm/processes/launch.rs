//! What a launcher's environment says of one rank's process: torchrun's and Kubernetes operators', Slurm's, those of MPI, and
//! `remesh train`'s own.

use super::hub::Hub;
use mesh::Rank;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

/// Where the job meets if only the address is said.
const DEFAULT_PORT: u16 = 29500;
/// Ports that are tried one after another where a launcher's own agent listens on the one that it names.
const NUM_PORTS: u16 = 16;

/// Who a process is, and where its job meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This rank.
    pub rank: Rank,
    /// Ranks of the job.
    pub num_ranks: u32,
    /// Its number among those of its machine, where that is known.
    pub local_rank: Option<u32>,
    /// The machine that ranks meet at.
    pub(super) host: String,
    /// Where to look for the hub there, in this order.
    pub(super) ports: Vec<u16>,
    /// Tells this job from others.
    pub(super) job: String,
    /// Whether the hub is this process's.
    pub(super) serves: bool,
}

/// A process cannot find its place among the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The environment says one thing and lacks what belongs to it.
    #[error("the environment has `{said}` but no `{lacks}`")]
    Lacks {
        /// What it has.
        said: &'static str,
        /// What it lacks.
        lacks: &'static str,
    },
    /// A variable is no number, or none that can be.
    #[error("the environment's `{name}` is `{value}`, not {expected}")]
    Value {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on port {ports}: {reason}")]
    Taken {
        /// What was tried.
        ports: String,
        /// The system's words for the last one.
        reason: String,
    },
    /// Nobody answered.
    #[error("no answer from rank 0 at `{host}`, port {ports}, within {limit:?}: {reason}")]
    Unreachable {
        /// Where.
        host: String,
        /// What was tried.
        ports: String,
        /// For how long.
        limit: Duration,
        /// What the last attempt said.
        reason: String,
    },
    /// The job has no place for this process.
    #[error("the job does not take this process: {why}")]
    Refused {
        /// Why.
        why: String,
    },
}

impl LaunchError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            LaunchError::Lacks { .. } | LaunchError::Value { .. } => "RM6011",
            LaunchError::Taken { .. } | LaunchError::Unreachable { .. } | LaunchError::Refused { .. } => {
                "RM3206"
            }
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            LaunchError::Lacks { .. } | LaunchError::Value { .. } => {
                "launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or Slurm's or MPI's names of the first \
                 three; unset them to run without a launcher"
            }
            LaunchError::Taken { .. } => "give a free MASTER_PORT",
            LaunchError::Unreachable { .. } => {
                "MASTER_ADDR and MASTER_PORT must be the same everywhere and reach the machine of rank 0"
            }
            LaunchError::Refused { .. } => {
                "all processes need one program, and a RANK of their own below one WORLD_SIZE"
            }
        }
    }
}

/// Names of one launcher: what it is known by, rank, ranks of the job, rank on the machine, ranks on the machine.
struct Names {
    mark: &'static str,
    rank: &'static str,
    num_ranks: &'static str,
    local_rank: &'static str,
    num_local: &'static str,
}

const HYDRA: Names = Names {
    mark: "MPI_LOCALRANKID",
    rank: "PMI_RANK",
    num_ranks: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    num_local: "MPI_LOCALNRANKS",
};

/// In the order in which they are asked. MPI's come before Slurm's: inside a Slurm job Slurm starts MPI's daemons, and these the ranks.
/// `srun` itself may speak PMI, too, without a number on the machine. The rank names of Slurm alone do not count, since a batch script
/// has them, too.
const LAUNCHERS: [Names; 5] = [
    Names {
        mark: "WORLD_SIZE",
        rank: "RANK",
        num_ranks: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        num_local: "LOCAL_WORLD_SIZE",
    },
    Names {
        mark: "OMPI_COMM_WORLD_SIZE",
        rank: "OMPI_COMM_WORLD_RANK",
        num_ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        num_local: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    HYDRA,
    Names { mark: SLURM, rank: "SLURM_PROCID", num_ranks: SLURM, local_rank: "SLURM_LOCALID", num_local: "" },
    Names { mark: "PMI_SIZE", ..HYDRA },
];

/// The size of a step that `srun` has started.
const SLURM: &str = "SLURM_STEP_NUM_TASKS";

/// What else is asked for.
const MEETING: [&str; 8] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
];

/// The hub of `remesh train`'s own launcher, as `HOST:PORT/WORD`, with a word that only its ranks know.
const OWN_HUB: &str = "REMESH_RDZV";

impl Launch {
    /// What the environment says, asked by `get`; `None` where no launcher has started several processes.
    ///
    /// # Errors
    /// What it lacks or cannot mean.
    pub fn from_environment(
        get: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Option<Launch>, LaunchError> {
        let number = |name: &'static str| -> Result<Option<u32>, LaunchError> {
            let Some(value) = get(name).filter(|_| !name.is_empty()) else { return Ok(None) };
            let expected = "a number".to_owned();
            value.trim().parse().map(Some).map_err(|_| LaunchError::Value { name, value, expected })
        };
        for Names { mark, rank, num_ranks, local_rank, num_local } in LAUNCHERS {
            let (Some(_), Some(size)) = (get(mark), number(num_ranks)?) else { continue };
            if size == 0 {
                let (value, expected) = ("0".to_owned(), "at least 1".to_owned());
                return Err(LaunchError::Value { name: num_ranks, value, expected });
            }
            let own = number(rank)?;
            if let Some(own) = own.filter(|own| *own >= size) {
                let expected = format!("below the {size} of `{num_ranks}`");
                return Err(LaunchError::Value { name: rank, value: own.to_string(), expected });
            }
            if size == 1 {
                continue;
            }
            let own = own.ok_or(LaunchError::Lacks { said: num_ranks, lacks: rank })?;
            let num_local = number(num_local)?;
            let is_one_machine = num_local == Some(size);
            // Who has a machine alone is its first.
            let known =
                if is_one_machine { Some(own) } else { num_local.filter(|ranks| *ranks == 1).map(|_| 0) };
            let mut launch = Launch {
                rank: Rank(own),
                num_ranks: size,
                local_rank: number(local_rank)?.or(known),
                host: String::new(),
                ports: Vec::new(),
                job: String::new(),
                serves: own == 0,
            };
            launch.meet(&get, num_ranks, is_one_machine)?;
            return Ok(Some(launch));
        }
        Ok(None)
    }

    /// The variables that [`Launch::from_environment`] asks for, but for `remesh train`'s own.
    pub fn variables() -> impl Iterator<Item = &'static str> {
        let of_launchers = LAUNCHERS.into_iter().flat_map(|names| {
            let Names { mark, rank, num_ranks, local_rank, num_local } = names;
            [mark, rank, num_ranks, local_rank, num_local]
        });
        of_launchers.chain(MEETING).filter(|name| !name.is_empty())
    }

    /// What [`Launch::from_environment`] understands, for one of `num_ranks` processes on this machine. They meet at the hub at
    /// `address` of the job `address/word`.
    pub fn environment(
        rank: u32,
        num_ranks: u32,
        address: SocketAddr,
        word: &str,
    ) -> [(&'static str, String); 5] {
        let [Names { rank: own, num_ranks: all, local_rank, num_local, .. }, ..] = LAUNCHERS;
        let (rank, num_ranks) = (rank.to_string(), num_ranks.to_string());
        [
            (own, rank.clone()),
            (all, num_ranks.clone()),
            (local_rank, rank),
            (num_local, num_ranks),
            (OWN_HUB, format!("{address}/{word}")),
        ]
    }

    /// Whether this process speaks for the job.
    pub fn is_first(&self) -> bool {
        self.rank == Rank(0)
    }

    /// Finds where the job meets.
    fn meet(
        &mut self,
        get: &impl Fn(&'static str) -> Option<String>,
        said: &'static str,
        is_one_machine: bool,
    ) -> Result<(), LaunchError> {
        let port = |name: &'static str, value: &str| -> Result<u16, LaunchError> {
            let wrong =
                || LaunchError::Value { name, value: value.to_owned(), expected: "a port".to_owned() };
            value.trim().parse().ok().filter(|port| *port > 0).ok_or_else(wrong)
        };
        if let Some(hub) = get(OWN_HUB) {
            let (address, _) = hub.split_once('/').unwrap_or((&hub, ""));
            let (host, of_hub) = address.rsplit_once(':').unwrap_or((address, ""));
            (self.host, self.ports) = (host.to_owned(), vec![port(OWN_HUB, of_hub)?]);
            (self.job, self.serves) = (hub.clone(), false);
            return Ok(());
        }
        let slurm_job = get("SLURM_JOB_ID");
        // A step of Slurm's that runs MPI's daemons is not the job's.
        let is_step = said == SLURM;
        let of_step = |name| is_step.then(|| get(name)).flatten();
        let host = get("MASTER_ADDR")
            .or_else(|| is_one_machine.then(|| "127.0.0.1".to_owned()))
            .or_else(|| first_host(&of_step("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"))?));
        self.host = host.ok_or(LaunchError::Lacks { said, lacks: "MASTER_ADDR" })?;
        let first = match (get("MASTER_PORT"), &slurm_job) {
            (Some(said), _) => port("MASTER_PORT", &said)?,
            // Steps of one machine at one time have jobs of their own.
            (None, Some(job)) => {
                20_000
                    + job
                        .bytes()
                        .fold(0u16, |sum, digit| ((u32::from(sum) * 10 + u32::from(digit)) % 10_000) as u16)
            }
            (None, None) => DEFAULT_PORT,
        };
        // The agent of torchrun listens on the port that it names.
        let run = get("TORCHELASTIC_RUN_ID");
        self.ports = match run {
            Some(_) => (1..=NUM_PORTS).filter_map(|offset| first.checked_add(offset)).collect(),
            None => vec![first],
        };
        let of_job = [run, get("TORCHELASTIC_RESTART_COUNT"), slurm_job, of_step("SLURM_STEP_ID")];
        self.job = of_job
            .into_iter()
            .flatten()
            .chain([format!("{}:{first}", self.host)])
            .collect::<Vec<_>>()
            .join("/");
        Ok(())
    }

    /// Starts the hub, if it is this process's.
    pub(super) fn serve(&self, timeout: Duration) -> Result<Option<Hub>, LaunchError> {
        if !self.serves {
            return Ok(None);
        }
        let mut last = String::from("no port was tried");
        for port in &self.ports {
            let address = (self.host.as_str(), *port).to_socket_addrs().ok().and_then(|mut all| all.next());
            // A name may stand for another machine's end of a network, so only the loopback is taken by its word.
            let listen = match address.map(|address| address.ip()) {
                Some(ip) if self.host == "localhost" || self.host == ip.to_string() && ip.is_loopback() => ip,
                Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
                _ => Ipv4Addr::UNSPECIFIED.into(),
            };
            let hub = TcpListener::bind((listen, *port))
                .and_then(|listener| Hub::serve(listener, &self.job, self.num_ranks, timeout));
            match hub {
                Ok(hub) => return Ok(Some(hub)),
                Err(error) => {
                    last = error.to_string();
                    if error.kind() != io::ErrorKind::AddrInUse {
                        break;
                    }
                }
            }
        }
        Err(LaunchError::Taken { ports: self.range(), reason: last })
    }

    pub(super) fn unreachable(&self, limit: Duration, reason: &str) -> LaunchError {
        let (host, ports) = (self.host.clone(), self.range());
        LaunchError::Unreachable { host, ports, limit, reason: reason.to_owned() }
    }

    fn range(&self) -> String {
        match self.ports[..] {
            [] => "none".to_owned(),
            [only] => only.to_string(),
            [first, .., last] => format!("{first} to {last}"),
        }
    }
}

/// The first of Slurm's list of hosts, such as `gpu[003-007,9],login1`.
fn first_host(hosts: &str) -> Option<String> {
    let end = hosts.find(',').unwrap_or(hosts.len());
    let Some(open) = hosts.find('[').filter(|open| *open < end) else {
        return Some(hosts[..end].to_owned()).filter(|host| !host.is_empty());
    };
    let close = open + hosts[open..].find(']')?;
    let number = hosts[open + 1..close].split(['-', ',']).next()?;
    let rest = hosts[close + 1..].split(',').next().unwrap_or_default();
    Some(format!("{}{number}{rest}", &hosts[..open]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(environment: &[(&str, &str)]) -> Result<Option<Launch>, LaunchError> {
        Launch::from_environment(|name| {
            assert!(
                ["", OWN_HUB].contains(&name) || Launch::variables().any(|known| known == name),
                "{name} is asked for"
            );
            let said = environment.iter().find(|(said, _)| *said == name);
            said.map(|(_, value)| (*value).to_owned())
        })
    }

    /// Rank, ranks, number on the machine, where the job meets, and whether the hub is this process's.
    fn place(launch: &Launch) -> (u32, u32, Option<u32>, &str, u16, usize, bool) {
        let Launch { rank, num_ranks, local_rank, host, ports, serves, .. } = launch;
        (rank.0, *num_ranks, *local_rank, host, ports[0], ports.len(), *serves)
    }

    #[test]
    fn launchers_are_known_by_their_environment() {
        let kubernetes =
            [("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "job-0"), ("MASTER_PORT", "23456")];
        let found = launch(&kubernetes).unwrap().unwrap();
        assert_eq!(place(&found), (0, 4, None, "job-0", 23456, 1, true));

        let torchrun =
            [&kubernetes[1..], &[("RANK", "3"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RUN_ID", "x")]].concat();
        let found = launch(&torchrun).unwrap().unwrap();
        assert_eq!(place(&found), (3, 4, Some(1), "job-0", 23457, 16, false), "its agent listens on 23456");

        let srun = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "gpu[003-005,9],login"),
            ("SLURM_JOB_ID", "1234567"),
        ];
        let found = launch(&srun).unwrap().unwrap();
        let (port, _) = (found.ports[0], assert!((20_000..30_000).contains(&found.ports[0])));
        assert_eq!(place(&found), (5, 8, Some(1), "gpu003", port, 1, false));

        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(place(&launch(&mpi).unwrap().unwrap()), (1, 2, Some(1), "127.0.0.1", 29500, 1, false));
        let elsewhere = [&mpi[..3], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]].concat();
        let lacks = LaunchError::Lacks { said: "OMPI_COMM_WORLD_SIZE", lacks: "MASTER_ADDR" };
        assert_eq!(launch(&elsewhere), Err(lacks));

        let own =
            [&kubernetes[..2], &[("LOCAL_RANK", "0"), ("REMESH_RDZV", "127.0.0.1:41234/word")]].concat();
        assert_eq!(place(&launch(&own).unwrap().unwrap()), (0, 4, Some(0), "127.0.0.1", 41234, 1, false));
    }

    #[test]
    fn inside_a_slurm_job_the_launcher_is_who_started_the_ranks() {
        // The daemon of the second node, in a step of the nodes after the first.
        let daemon = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "3"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[2-4]"),
            ("SLURM_JOB_NODELIST", "gpu[1-4]"),
            ("SLURM_JOB_ID", "1234567"),
            ("SLURM_STEP_ID", "0"),
        ];
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "9"),
            ("OMPI_COMM_WORLD_SIZE", "32"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
        ];
        let hydra =
            [("PMI_RANK", "9"), ("PMI_SIZE", "32"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "8")];
        for ranks in [&open_mpi, &hydra] {
            let found = launch(&[&daemon[..], &ranks[..]].concat()).unwrap().unwrap();
            assert_eq!((found.rank, found.num_ranks, found.local_rank), (Rank(9), 32, Some(1)));
            let on_first_node = launch(&[&daemon[4..6], &ranks[..]].concat()).unwrap().unwrap();
            assert_eq!(found, on_first_node);
            assert_eq!(found.host, "gpu1");
        }
        // `srun --mpi=pmi2`
        let srun = [&daemon[..], &[("PMI_RANK", "0"), ("PMI_SIZE", "3")]].concat();
        let found = launch(&srun).unwrap().unwrap();
        assert_eq!((found.num_ranks, found.local_rank, found.host.as_str()), (3, Some(0), "gpu2"));
    }

    #[test]
    fn a_batch_script_or_a_single_task_is_no_launch() {
        assert_eq!(launch(&[]), Ok(None));
        assert_eq!(launch(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "1")]), Ok(None));
        assert_eq!(launch(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
    }

    #[test]
    fn what_an_environment_lacks_or_cannot_mean_is_named() {
        let said = |environment: &[(&str, &str)]| launch(environment).unwrap_err().to_string();
        assert_eq!(said(&[("WORLD_SIZE", "2")]), "the environment has `WORLD_SIZE` but no `RANK`");
        assert_eq!(
            said(&[("WORLD_SIZE", "2"), ("RANK", "2"), ("MASTER_ADDR", "a")]),
            "the environment's `RANK` is `2`, not below the 2 of `WORLD_SIZE`"
        );
        assert_eq!(
            said(&[("WORLD_SIZE", "0"), ("RANK", "0")]),
            "the environment's `WORLD_SIZE` is `0`, not at least 1"
        );
        assert_eq!(
            said(&[("WORLD_SIZE", "1"), ("RANK", "1")]),
            "the environment's `RANK` is `1`, not below the 1 of `WORLD_SIZE`"
        );
        assert_eq!(said(&[("WORLD_SIZE", "two")]), "the environment's `WORLD_SIZE` is `two`, not a number");
        let port = [("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "0")];
        assert_eq!(said(&port), "the environment's `MASTER_PORT` is `0`, not a port");
    }

    #[test]
    fn the_first_host_of_a_list_is_read_as_slurm_writes_it() {
        for (list, first) in
            [("a", "a"), ("a,b[1-2]", "a"), ("n[01-04]", "n01"), ("n[7,9]-x,m", "n7-x"), ("c[3]", "c3")]
        {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
        assert_eq!(first_host(""), None);
    }
}
