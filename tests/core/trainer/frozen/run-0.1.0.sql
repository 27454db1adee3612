PRAGMA application_id = 1280461907;
BEGIN TRANSACTION;
CREATE TABLE aliases (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        version INTEGER NOT NULL,
        at REAL NOT NULL,
        earlier INTEGER
    );
CREATE TABLE answers (id TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL, answer TEXT NOT NULL);
CREATE TABLE attempts (
        n INTEGER PRIMARY KEY,
        rollout TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        worker TEXT NOT NULL,
        leased_at REAL NOT NULL,
        ended_at REAL,
        ending TEXT NOT NULL DEFAULT '',
        outcome_digest TEXT NOT NULL DEFAULT '',
        tool_events TEXT NOT NULL DEFAULT '[]',
        step_rewards TEXT NOT NULL DEFAULT '[]', labels TEXT NOT NULL DEFAULT '{}',
        UNIQUE (rollout, attempt)
    );
INSERT INTO "attempts" VALUES(1,'run/val/0/0',1,'run/local',1.79571654438598299029e+09,1.79571654448998570437e+09,'reward','9bcffca7141cd3d3f7116923a894f00b0a8bf95602ca78bc8bcb369703cfeee9','[]','[]','{}');
INSERT INTO "attempts" VALUES(2,'run/val/0/1',1,'run/local',1.79571654438598299029e+09,1.79571654448998570437e+09,'reward','77af544d64a22cadc1aebe1bdeda09649d9773d39be0ace92a112570c2204390','[]','[]','{}');
INSERT INTO "attempts" VALUES(3,'run/val/0/2',1,'run/local',1.79571654438598299029e+09,1.79571654448998570437e+09,'reward','900e9a98d7090b12e90edf26d507a0f79a2220627be578662f8b05e2e5f2e17c','[]','[]','{}');
INSERT INTO "attempts" VALUES(4,'run/0/0/0',1,'run/local',1.7957165445169820786e+09,1.79571654466801738743e+09,'reward','d6c677f27ba18ed832be5d5850bacd8a4a34c5b85896d56f351ddef894fa0f05','[]','[]','{}');
INSERT INTO "attempts" VALUES(5,'run/0/0/1',1,'run/local',1.7957165445169820786e+09,1.79571654466801738743e+09,'reward','3061c1e1262232d0870528fc00712cd8442d71a91514b2b8e30539e2c1a36e42','[]','[]','{}');
INSERT INTO "attempts" VALUES(6,'run/0/0/2',1,'run/local',1.7957165445169820786e+09,1.79571654466801738743e+09,'reward','b3e12197cb861708b6b9599482d58991416409386e5f5f36845c2ce6fb524102','[]','[]','{}');
INSERT INTO "attempts" VALUES(7,'run/0/0/3',1,'run/local',1.7957165445169820786e+09,1.79571654466801738743e+09,'reward','0050f4747762cb48feb60c418872c5354f7076d6ace0336aea314d977c83078e','[]','[]','{}');
INSERT INTO "attempts" VALUES(8,'run/0/1/0',1,'run/local',1.7957165445169820786e+09,1.79571654468000674242e+09,'reward','fcff0a0fe4a56e667ae6dfabb81ade32e51e8f3a50ee5f02eccf4fd157a5c01c','[]','[]','{}');
INSERT INTO "attempts" VALUES(9,'run/0/1/1',1,'run/local',1.7957165445169820786e+09,1.79571654468000674242e+09,'reward','01e5833201780ba9693d8f4d2b4cd1243000d52f380c5ff3a6a9367c7843237e','[]','[]','{}');
INSERT INTO "attempts" VALUES(10,'run/0/1/2',1,'run/local',1.7957165445169820786e+09,1.79571654468000674242e+09,'reward','25563287348be6c0923332549c565424e44d6cd680446def85dc6d1af555ca70','[]','[]','{}');
INSERT INTO "attempts" VALUES(11,'run/0/1/3',1,'run/local',1.7957165445169820786e+09,1.79571654468000674242e+09,'reward','e30c4cfd714c1705cd55fee83b03f5f3e1455b9d240f1ace9d912353127d1e31','[]','[]','{}');
INSERT INTO "attempts" VALUES(12,'run/1/0/0',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','6b2325f641cc0f51341e6a26c7ddeb6e5582be4716b842123b7d4a1295f56d47','[]','[]','{}');
INSERT INTO "attempts" VALUES(13,'run/1/0/1',1,'run/local',1795716550.001,1.79571655015400648116e+09,'reward','07b89d3cb51befba3f3971628657697e94ea1ce3ee4d8313ee8d8c7bc072bf13','[]','[]','{}');
INSERT INTO "attempts" VALUES(14,'run/1/0/2',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','1a83471b42ac086f8ab2ca177a8b1089280880ebf51a9b8fbefe6f24a1512f33','[]','[]','{}');
INSERT INTO "attempts" VALUES(15,'run/1/0/3',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','6ee1ce0bcc500d259767cac42b2714f65c3b01f4d94aa2a8b8054291ad6aa583','[]','[]','{}');
INSERT INTO "attempts" VALUES(16,'run/1/1/0',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','10c2952593e5f739028af124b35ae516694e0e56b0b436b725c2b3f22c085a44','[]','[]','{}');
INSERT INTO "attempts" VALUES(17,'run/1/1/1',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','962ea4d0204687a62887a6321cac3e349408e3bc6775497373f2a26eb72a5aa9','[]','[]','{}');
INSERT INTO "attempts" VALUES(18,'run/1/1/2',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','628312f555edce839c828f401e6db5107380f5dd3c4536923ec3228417224b46','[]','[]','{}');
INSERT INTO "attempts" VALUES(19,'run/1/1/3',1,'run/local',1795716550.001,1.79571655016800761227e+09,'reward','580b3c460653c8b614ff785b95fb9812bc118b19722d5cc51d0ef0037882770c','[]','[]','{}');
INSERT INTO "attempts" VALUES(20,'run/val/2/0',1,'run/local',1.79571655022401213642e+09,1.79571655031401371952e+09,'reward','65ded10cabea687554ee5fb26389e68a4f577de8bacae5e670eca2016c97bab9','[]','[]','{}');
INSERT INTO "attempts" VALUES(21,'run/val/2/1',1,'run/local',1.79571655022401213642e+09,1.79571655031401371952e+09,'reward','6288f3a4607f25d0aa732ad510c324b0e62626a76bae86ccc3ec216856411ce1','[]','[]','{}');
INSERT INTO "attempts" VALUES(22,'run/val/2/2',1,'run/local',1.79571655022401213642e+09,1.79571655031401371952e+09,'reward','e95c015252e8e37dc3ca8c0f44b7672aa082154822fc71c7bd933f56a66b530f','[]','[]','{}');
CREATE TABLE metrics (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        value REAL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step, name)
    );
INSERT INTO "metrics" VALUES('run',0,'eval/failed',0.0,1.79571654450201535226e+09);
INSERT INTO "metrics" VALUES('run',0,'eval/reward',1.0,1.79571654450201535226e+09);
INSERT INTO "metrics" VALUES('run',0,'seconds/eval',1.2470875399958458729e-01,1.79571654450201535226e+09);
INSERT INTO "metrics" VALUES('run',0,'calls_per_rollout',2.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'drift_tokens',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'failed',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'groups',2.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'groups_used',2.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'held_seconds',3.1590869984938763082e-03,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'loss',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'max_logprob_gap',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'preemptions',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'prefix_hit_share',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'probe_gap',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'probe_gap_mean',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'reward',1.625,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'reward_std',6.95970545353752689798e-01,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'rollouts',8.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'rows',16.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'seconds/checkpoint',5.66851629992015659809e-02,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'seconds/rollout',1.95872985001187771558e-01,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'seconds/train',5.18804207999710342846e+00,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'seconds/update',1.3366897001105826348e-02,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'staleness_max',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'staleness_mean',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'stepped',1.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'tokens',128.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'tokens_per_second',1.63391786371155745883e+02,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',0,'truncated',0.0,1.79571654998100399972e+09);
INSERT INTO "metrics" VALUES('run',1,'calls_per_rollout',2.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'drift_tokens',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'failed',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'groups',2.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'groups_used',2.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'held_seconds',6.02676799826440401375e-03,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'loss',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'max_logprob_gap',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'preemptions',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'prefix_hit_share',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'probe_gap',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'probe_gap_mean',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'reward',0.875,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'reward_std',5.99478940414089889188e-01,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'rollouts',8.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'rows',12.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'seconds/checkpoint',6.6142760006187018007e-03,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'seconds/rollout',1.97327886999119073152e-01,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'seconds/train',1.00679419992957264184e-02,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'seconds/update',9.12878999952226877212e-03,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'staleness_max',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'staleness_mean',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'stepped',1.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'tokens',96.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'tokens_per_second',162.187406139656,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',1,'truncated',0.0,1.79571655021298837661e+09);
INSERT INTO "metrics" VALUES('run',2,'eval/failed',0.0,1.79571655031699085238e+09);
INSERT INTO "metrics" VALUES('run',2,'eval/reward',2.0,1.79571655031699085238e+09);
INSERT INTO "metrics" VALUES('run',2,'seconds/eval',9.98961679979402106255e-02,1.79571655031699085238e+09);
CREATE TABLE resources (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        kind TEXT NOT NULL,
        digest TEXT NOT NULL,
        content TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at REAL NOT NULL,
        UNIQUE (name, version),
        UNIQUE (name, digest)
    );
CREATE TABLE revisions (run TEXT PRIMARY KEY, n INTEGER NOT NULL);
INSERT INTO "revisions" VALUES('',6);
INSERT INTO "revisions" VALUES('run',12);
CREATE TABLE rollouts (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        task TEXT NOT NULL,
        group_id TEXT NOT NULL,
        step INTEGER NOT NULL,
        split TEXT NOT NULL,
        idx INTEGER NOT NULL,
        max_attempts INTEGER NOT NULL,
        status TEXT NOT NULL DEFAULT 'pending',
        attempt INTEGER NOT NULL DEFAULT 0,
        spent INTEGER NOT NULL DEFAULT 0,
        worker TEXT NOT NULL DEFAULT '',
        lease_until REAL,
        reward REAL,
        rewards TEXT NOT NULL DEFAULT '{}',
        fault TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        seconds REAL NOT NULL DEFAULT 0,
        trained_at_step INTEGER
    , resources TEXT NOT NULL DEFAULT '{}');
INSERT INTO "rollouts" VALUES(1,'run/val/0/0','run','["task-0d23e590a0d0e006","held out 0",null,{}]','run/val/0/0',0,'val',0,2,'succeeded',1,1,'',NULL,0.0,'{}','','',0.084883744999388,NULL,'{}');
INSERT INTO "rollouts" VALUES(2,'run/val/0/1','run','["task-0fb0878007a9f38b","held out 1",null,{}]','run/val/0/1',0,'val',0,2,'succeeded',1,1,'',NULL,2.0,'{}','','',8.40747859983821399509e-02,NULL,'{}');
INSERT INTO "rollouts" VALUES(3,'run/val/0/2','run','["task-70f47796f7d433e8","held out 2",null,{}]','run/val/0/2',0,'val',0,2,'succeeded',1,1,'',NULL,1.0,'{}','','',0.0837438230009866,NULL,'{}');
INSERT INTO "rollouts" VALUES(4,'run/0/0/0','run','["task-91b463beda156078","question 0",null,{}]','run/0/0',0,'train',0,2,'succeeded',1,1,'',NULL,0.0,'{}','','',1.26646958000492304563e-01,0,'{}');
INSERT INTO "rollouts" VALUES(5,'run/0/0/1','run','["task-91b463beda156078","question 0",null,{}]','run/0/0',0,'train',1,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.13742621997516835108e-01,0,'{}');
INSERT INTO "rollouts" VALUES(6,'run/0/0/2','run','["task-91b463beda156078","question 0",null,{}]','run/0/0',0,'train',2,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.13294833001418737694e-01,0,'{}');
INSERT INTO "rollouts" VALUES(7,'run/0/0/3','run','["task-91b463beda156078","question 0",null,{}]','run/0/0',0,'train',3,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.13065089997689938172e-01,0,'{}');
INSERT INTO "rollouts" VALUES(8,'run/0/1/0','run','["task-bdf5322103a9681f","question 1",null,{}]','run/0/1',0,'train',0,2,'succeeded',1,1,'',NULL,1.0,'{}','','',1.20201925001310883089e-01,0,'{}');
INSERT INTO "rollouts" VALUES(9,'run/0/1/1','run','["task-bdf5322103a9681f","question 1",null,{}]','run/0/1',0,'train',1,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.20118830996943870559e-01,0,'{}');
INSERT INTO "rollouts" VALUES(10,'run/0/1/2','run','["task-bdf5322103a9681f","question 1",null,{}]','run/0/1',0,'train',2,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.20028367000486468896e-01,0,'{}');
INSERT INTO "rollouts" VALUES(11,'run/0/1/3','run','["task-bdf5322103a9681f","question 1",null,{}]','run/0/1',0,'train',3,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.19783981001091888174e-01,0,'{}');
INSERT INTO "rollouts" VALUES(12,'run/1/0/0','run','["task-ee9f769d3138d6a9","question 4",null,{}]','run/1/0',1,'train',0,2,'succeeded',1,1,'',NULL,1.0,'{}','','',1.0544153800219646655e-01,1,'{}');
INSERT INTO "rollouts" VALUES(13,'run/1/0/1','run','["task-ee9f769d3138d6a9","question 4",null,{}]','run/1/0',1,'train',1,2,'succeeded',1,1,'',NULL,1.0,'{}','','',1.05384422000497579574e-01,1,'{}');
INSERT INTO "rollouts" VALUES(14,'run/1/0/2','run','["task-ee9f769d3138d6a9","question 4",null,{}]','run/1/0',1,'train',2,2,'succeeded',1,1,'',NULL,0.0,'{}','','',1.05138254999474156647e-01,1,'{}');
INSERT INTO "rollouts" VALUES(15,'run/1/0/3','run','["task-ee9f769d3138d6a9","question 4",null,{}]','run/1/0',1,'train',3,2,'succeeded',1,1,'',NULL,1.0,'{}','','',1.05031895996944513171e-01,1,'{}');
INSERT INTO "rollouts" VALUES(16,'run/1/1/0','run','["task-36b3d921baab2eb8","question 3",null,{}]','run/1/1',1,'train',0,2,'succeeded',1,1,'',NULL,0.0,'{}','','',1.04951715999050065875e-01,1,'{}');
INSERT INTO "rollouts" VALUES(17,'run/1/1/1','run','["task-36b3d921baab2eb8","question 3",null,{}]','run/1/1',1,'train',1,2,'succeeded',1,1,'',NULL,2.0,'{}','','',1.00617234998935600742e-01,1,'{}');
INSERT INTO "rollouts" VALUES(18,'run/1/1/2','run','["task-36b3d921baab2eb8","question 3",null,{}]','run/1/1',1,'train',2,2,'succeeded',1,1,'',NULL,1.0,'{}','','',0.0999911599974439,NULL,'{}');
INSERT INTO "rollouts" VALUES(19,'run/1/1/3','run','["task-36b3d921baab2eb8","question 3",null,{}]','run/1/1',1,'train',3,2,'succeeded',1,1,'',NULL,1.0,'{}','','',9.98578409999026916921e-02,NULL,'{}');
INSERT INTO "rollouts" VALUES(20,'run/val/2/0','run','["task-0d23e590a0d0e006","held out 0",null,{}]','run/val/2/0',2,'val',0,2,'succeeded',1,1,'',NULL,2.0,'{}','','',3.35800059983739629387e-02,NULL,'{}');
INSERT INTO "rollouts" VALUES(21,'run/val/2/1','run','["task-0fb0878007a9f38b","held out 1",null,{}]','run/val/2/1',2,'val',0,2,'succeeded',1,1,'',NULL,2.0,'{}','','',3.31569850022788159549e-02,NULL,'{}');
INSERT INTO "rollouts" VALUES(22,'run/val/2/2','run','["task-70f47796f7d433e8","held out 2",null,{}]','run/val/2/2',2,'val',0,2,'succeeded',1,1,'',NULL,2.0,'{}','','',3.30102049993001855909e-02,NULL,'{}');
CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        config TEXT NOT NULL,
        created_at REAL NOT NULL
    , project TEXT NOT NULL DEFAULT 'default');
INSERT INTO "runs" VALUES(1,'run','run','{"algorithm":{"name":"lightning_rl","type":"LightningRL","arguments":{"low_level":"grpo","group_size":4,"credit":"identical","tool_reward":null,"clip_low":0.2,"clip_high":0.2,"entropy_coefficient":0.0,"normalization":"rollout-mean","constant_tokens":1024,"advantage_eps":0.0001,"kl_coefficient":0.0,"kl_estimator":"k2","correction":{"type":"lightning.losses.correction.Correction","kind":"mask","level":"token","low":0.5,"high":5.0,"dual_clip":3.0},"value_coefficient":0.5,"dynamic_sampling":false,"overlong_tokens":null,"overlong_buffer":0,"overlong_penalty":1.0}},"model":"m","critic":"","train_agents":[],"seed":0,"config":{"trainer":{"steps":2,"tasks_per_step":2,"max_staleness":0,"max_waves":4,"order":"shuffled","eval_every":0,"eval_temperature":null,"checkpoint_every":null,"keep_checkpoints":2,"seed":0,"project":"default","trackers":["jsonl","tensorboard"],"max_logprob_gap":null},"engine":{"dtype":"auto","device":"auto","threads":1,"tokens_per_microbatch":8192,"lr":null,"betas":[0.9,0.95],"eps":1e-08,"weight_decay":0.0,"max_grad_norm":1.0,"max_nonfinite_steps":3,"warmup_steps":0,"step":"auto","gradient_checkpointing":false,"lora":null,"critic_lr":0.05,"critic_trunk":"frozen","verl":{"world_size":1,"nodes":1,"address":"","restarts":3,"start_timeout":600.0,"strategy":"fsdp2","model":{},"sharding":{},"megatron":{},"optimizer":{}}},"policy_server":{"attach":"","device":"auto","host":"127.0.0.1","port":0,"dtype":"auto","max_model_len":null,"kv_cache_bytes":null,"gpu_memory_utilization":0.4,"tool_call_parser":"auto","reasoning_parser":"auto","args":[],"start_timeout":null,"weight_transfer":"auto","transfer_timeout":600.0},"gateway":{"host":"127.0.0.1","port":0,"token_ttl":3600.0,"max_body_bytes":33554432,"hold_timeout":600.0,"upstream_timeout":600.0,"override_sampling":{},"seed_calls":false,"allowed_upstreams":["loopback","private"],"limits":{"hosts":[],"header_timeout":20.0,"body_timeout":60.0,"write_timeout":120.0,"requests_per_second":2000.0,"concurrent_requests":2048,"failures_per_minute":120.0}},"server":{"host":"127.0.0.1","port":0,"public_url":""},"runner":{"concurrency":8,"timeout":300.0,"max_attempts":2,"lease_ttl":60.0,"drain":30.0,"adapters":null,"prompts":{},"reroute":[],"preload":[],"rollouts_per_process":1000,"sandbox":"none","sandbox_files":[],"sandbox_hidden":["runs"],"ray":{"address":"","agents_per_actor":1,"num_cpus":1.0,"num_gpus":0.0,"memory_bytes":0,"resources":{},"scheduling":"DEFAULT","runtime_env":{},"start_timeout":300.0},"k8s":{"mode":"pool","pods":1,"image":"","agent":"","namespace":"","kubeconfig":"","context":"","template":"","service_account":"","node_selector":{},"env":{},"requests":{},"limits":{},"image_pull_secrets":[],"start_timeout":600.0}},"optimizer_model":{"model":"","base_url":"","api_key_env":"OPENAI_API_KEY","temperature":1.0,"timeout":120.0,"attempts":4,"concurrency":8}}}',1.79571654401636838908e+09,'default');
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO "schema_version" VALUES(8);
CREATE TABLE spans (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        span_id TEXT NOT NULL,
        trace_id TEXT NOT NULL,
        parent_id TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        status TEXT NOT NULL,
        error TEXT NOT NULL,
        service TEXT NOT NULL,
        attributes TEXT NOT NULL,
        UNIQUE (rollout, attempt, span_id)
    );
CREATE TABLE state (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (run, name)
    );
INSERT INTO "state" VALUES('','policy/run','{"owner":"owner-298ad91923ba4d1f","epoch":3,"stance":"open","version":2,"updated":3,"servers":[],"counts":{},"taken":[],"first":0,"seed":null}');
CREATE TABLE steps (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        rollouts TEXT NOT NULL,
        digests TEXT NOT NULL,
        digest TEXT NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL,
        at REAL NOT NULL, group_ids TEXT NOT NULL DEFAULT '[]', context TEXT NOT NULL DEFAULT '{}',
        PRIMARY KEY (run, step)
    );
INSERT INTO "steps" VALUES('run',0,1,'[["run/0/0/0",1],["run/0/0/1",1],["run/0/0/2",1],["run/0/0/3",1],["run/0/1/0",1],["run/0/1/1",1],["run/0/1/2",1],["run/0/1/3",1]]','["1e1485a28934eb76c47efec687f45e10a4e807606925c4602ba13789d17e9358","1bdd8189eed62a1c8c467892a6bdafa7031e2d3291cce7f7cfca56009a62fa6d","347f58e734936945c564aae87c8b9c232466a6f0b90ff6fc0b7b098a7530ceac","c2f50c14ecbb02e1bac3731048d9dce6d40786b23e1c581ccb11c599f4bc737f","c3210071fb82708223de76829487c1e086e2d2c4006a14ca206ec89041420779","184e83c939c16075dca03e1f6b524caf08a2f0b9eab6bcc1b8d51a53943c5ba0","2dc521d471c098da6ecbaa13e04dbbb380ea47ac32b2453cde79ed32d4b78d88","deb677e44a32af34297cefd29e56537dd14eccd9daaa1cc97e11cfad1d5b3dac"]','a293684e4a931c90570a634ea753e7f2c7b32e5879f3f233c6438eceed825982','','{"loss":0.0,"max_logprob_gap":0.0,"tokens":128.0,"stepped":1.0,"reward":1.625,"reward_std":0.6959705453537527,"rollouts":8.0,"failed":0.0,"groups":2.0,"groups_used":2.0,"rows":16.0,"calls_per_rollout":2.0,"truncated":0.0,"staleness_mean":0.0,"staleness_max":0.0,"prefix_hit_share":0.0,"preemptions":0.0,"drift_tokens":0,"tokens_per_second":163.39178637115575}',1.79571654994901871681e+09,'["run/0/0","run/0/1"]','{"epoch":0,"weights":"the base","base":"the base","dtype":"auto","device":"auto","threads":1,"tokens_per_microbatch":8192,"path":"auto","cpu":"x86_64 sse4_2 avx avx2 avx512f avx512_bf16","versions":{"lightning":"0.1.0","torch":"2.13.0+cpu","transformers":"5.10.4"}}');
INSERT INTO "steps" VALUES('run',1,2,'[["run/1/0/0",1],["run/1/0/1",1],["run/1/0/2",1],["run/1/0/3",1],["run/1/1/0",1],["run/1/1/1",1]]','["db0cb34bfcbc34eb77a5415a33430a7d210345180740a823860bcc8974341096","9911e16e25b9f7a7cce57e7ac5614f26e3dab9b458726ecabcc4c56593d215ba","bc4f5c9a9a9d590c274df14ab9a7da4a46bcc640fd18ba40de3d8c696506d42b","802638a1ab850c91900537e4270d76dd4f8b74a1d42911bc85985cc50d3c33d9","0379234d9470b0407b758bd90f5dd35a4e310cfe4c5a242ed4215db0786586ea","9a13a5a4e7c0540678dd7369b1c97c51b3de99475b4ef1ba2eb08343f1592836"]','2d0f2a235265ed0b4caa105dbb14bd76a3b2e15918290e11b42ccdd983fa1d7a','step-00000002','{"loss":0.0,"max_logprob_gap":0.0,"tokens":96.0,"stepped":1.0,"reward":0.875,"reward_std":0.5994789404140899,"rollouts":8.0,"failed":0.0,"groups":2.0,"groups_used":2.0,"rows":12.0,"calls_per_rollout":2.0,"truncated":0.0,"staleness_mean":0.0,"staleness_max":0.0,"prefix_hit_share":0.0,"preemptions":0.0,"drift_tokens":0,"tokens_per_second":162.187406139656}',1.79571655019798135754e+09,'["run/1/0","run/1/1"]','{"epoch":0,"weights":"0cd047f779ebf6737b69b3981e0c57d4e3d938560d3bb65db4d3ff673ec6158c","base":"the base","dtype":"auto","device":"auto","threads":1,"tokens_per_microbatch":8192,"path":"auto","cpu":"x86_64 sse4_2 avx avx2 avx512f avx512_bf16","versions":{"lightning":"0.1.0","torch":"2.13.0+cpu","transformers":"5.10.4"}}');
CREATE TABLE tokens (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL,
        digest TEXT NOT NULL,
        project TEXT NOT NULL,
        name TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL
    );
CREATE TABLE transitions (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        parent INTEGER,
        id TEXT NOT NULL,
        caller TEXT NOT NULL,
        versions TEXT NOT NULL,
        status TEXT NOT NULL,
        finish_reason TEXT NOT NULL,
        choice INTEGER NOT NULL,
        temperature REAL NOT NULL,
        constrained INTEGER NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        digest BLOB NOT NULL,
        tokens BLOB NOT NULL, tool_calls TEXT NOT NULL DEFAULT '[]', conversation TEXT NOT NULL DEFAULT '',
        UNIQUE (rollout, attempt, seq)
    );
INSERT INTO "transitions" VALUES(1,1,1,0,NULL,'chatcmpl-aef49fa757184ebf1','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1795716544.397,1.79571654442810225483e+09,X'3D1C953CBFB330CF',X'012C66D62C2B0E603E000702022128B52FFD2018C100000B0CC343261A739A02625C273837013C1C00141FAE85C7CB28B52FFD2014550000200000BEBF010008C002','[]','');
INSERT INTO "transitions" VALUES(2,2,1,0,NULL,'chatcmpl-aef49fa757184ebf2','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654441091179852e+09,1.79571654443378567701e+09,X'F427F1B78F22A255',X'01E852653B83958C8A000702022128B52FFD2018C100000B0CC3B9261A73D502625C277637013C6100E11F7A85B4CB28B52FFD2014550000200000BFBF010008C002','[]','');
INSERT INTO "transitions" VALUES(3,3,1,0,NULL,'chatcmpl-aef49fa757184ebf3','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1795716544.41174,1.79571654443411087985e+09,X'40D5A64B7477A4CC',X'01686C52B464385ADA000702022128B52FFD2018C100000B0CC357261A735302625C275F37013C3000661F668526CB28B52FFD2014550000200000BFBF010008C002','[]','');
INSERT INTO "transitions" VALUES(4,1,1,1,1,'chatcmpl-aef49fa757184ebf4','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654446078825002e+09,1.79571654446328067781e+09,X'878477941B6ADCEA',X'01D9B700742A3822BB070002021328B52FFD200A5100004D025500521FB885BECB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(5,2,1,1,2,'chatcmpl-aef49fa757184ebf5','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654446125245096e+09,1.79571654446595072745e+09,X'AB91A1B026FEE885',X'01979DDD27723D218D070002021328B52FFD200A510000520251003D1F0A85B7CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(6,3,1,1,3,'chatcmpl-aef49fa757184ebf6','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654446159029009e+09,1.79571654446625041958e+09,X'809228A2750A5FAE',X'0145945F8551600279070002021328B52FFD200A51000009027B00851FEB85F1CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(7,4,1,0,NULL,'chatcmpl-aef49fa757184ebf7','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654453657627106e+09,1.79571654457132673268e+09,X'49DD4290CCA354C8',X'015242D76270514EC2000602021F28B52FFD2016B100000B4943261A734D02620A3837013C5500521FB885BECB28B52FFD2012550000200000BFBF010032C002','[]','');
INSERT INTO "transitions" VALUES(8,5,1,0,7,'chatcmpl-aef49fa757184ebf8','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654453713560111e+09,1.79571654457366895675e+09,X'452D4BFCF320F3D2',X'01CFF92ADF4E77FDCB060002021328B52FFD200A5100000F0216000A1FD78563CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(9,6,1,0,7,'chatcmpl-aef49fa757184ebf9','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.7957165445508682728e+09,1.79571654457391881938e+09,X'506FD7CB5FC4CBFB',X'01EAFC3E0871D81222060002021328B52FFD200A5100009A021C00141FAE85C7CB28B52FFD200631000000000000BEBF','[]','');
INSERT INTO "transitions" VALUES(10,7,1,0,7,'chatcmpl-aef49fa757184ebfa','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654455137968064e+09,1.79571654457401394845e+09,X'852D68A1C01CCAC0',X'01EAFC3E0871D81222060002021328B52FFD200A5100009A021C00141FAE85C7CB28B52FFD200631000000000000BEBF','[]','');
INSERT INTO "transitions" VALUES(11,8,1,0,NULL,'chatcmpl-aef49fa757184ebfb','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654455176377292e+09,1.79571654458474230763e+09,X'1CC72353DE3EA4D8',X'0148E879815093647E000602021F28B52FFD2016B100000B49B9261A734D02620A7637013C5500521FB885BECB28B52FFD2012550000200000BFBF010032C002','[]','');
INSERT INTO "transitions" VALUES(12,9,1,0,11,'chatcmpl-aef49fa757184ebfc','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654455242323876e+09,1.79571654459780049323e+09,X'5D59BC715B374388',X'0148E879815093647E060002021328B52FFD200A5100004D025500521FB885BECB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(13,10,1,0,11,'chatcmpl-aef49fa757184ebfd','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654455288314822e+09,1.79571654459810304636e+09,X'63CA0CDF5F7C6D2C',X'010A4BA98CB427EA78060002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(14,11,1,0,11,'chatcmpl-aef49fa757184ebfe','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654455324459078e+09,1.79571654459821152685e+09,X'E0D3762A0C9669EF',X'010EDFD8A53BE11010060002021328B52FFD200A510000D5026100E11F7A85B4CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(15,4,1,1,7,'chatcmpl-aef49fa757184ebff','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654460635495185e+09,1.79571654462121486667e+09,X'13B8A3F6D003E25D',X'01EAFC3E0871D81222060002021328B52FFD200A5100009A021C00141FAE85C7CB28B52FFD200631000000000000BEBF','[]','');
INSERT INTO "transitions" VALUES(16,5,1,1,8,'chatcmpl-aef49fa757184ebf10','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.7957165446067740917e+09,1.79571654462198305136e+09,X'AAA7E163CBD160DC',X'0183577F48F6A62673060002021328B52FFD200A510000D5026100E11F7A85B4CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(17,6,1,1,9,'chatcmpl-aef49fa757184ebf11','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654460694122307e+09,1.79571654462213206289e+09,X'E014C1A65F3FE747',X'015C84AE60FCA74F02060002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(18,7,1,1,10,'chatcmpl-aef49fa757184ebf12','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654460706281661e+09,1.79571654462222790715e+09,X'12092B8089AEA2C4',X'01A3C4B56B09BF8715060002021328B52FFD200A51000009027B00851FEB85F1CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(19,8,1,1,11,'chatcmpl-aef49fa757184ebf13','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654460906219479e+09,1.79571654462750267982e+09,X'387DD63221F89D93',X'0123E05E04F7A6EE7E060002021328B52FFD200A510000520251003D1F0A85B7CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(20,9,1,1,12,'chatcmpl-aef49fa757184ebf14','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654461983370781e+09,1.79571654463783478739e+09,X'F92DD063AC1EFA83',X'010EDFD8A53BE11010060002021328B52FFD200A510000D5026100E11F7A85B4CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(21,10,1,1,13,'chatcmpl-aef49fa757184ebf15','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654462041354182e+09,1.79571654463809657091e+09,X'55859D258A4F50B6',X'01C837B340138E42CB060002021328B52FFD200A51000009027B00851FEB85F1CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(22,11,1,1,14,'chatcmpl-aef49fa757184ebf16','["agent"]','[[0,0]]','ok','stop',0,1.0,0,1.79571654462058591839e+09,1.79571654463819646834e+09,X'7F686DE7C05480B5',X'019F6B744B855681BF060002021328B52FFD200A5100000F0216000A1FD78563CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(23,12,1,0,NULL,'chatcmpl-aef49fa757184ebf17','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655004023766517e+09,1.79571655007966780662e+09,X'39251C4E3EA3B118',X'0158C0C41A60C67C01000602021F28B52FFD2016B100000B49A8261A730902620A6437013C7B00851FEB85F1CB28B52FFD2012550000200000BFBF010032C002','[]','');
INSERT INTO "transitions" VALUES(24,13,1,0,23,'chatcmpl-aef49fa757184ebf18','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655004061198233e+09,1.79571655008704876904e+09,X'354B56D5AE94E248',X'01391AE3ACBB55CD1C060002021328B52FFD200A5100000F0216000A1FD78563CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(25,14,1,0,23,'chatcmpl-aef49fa757184ebf19','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.795716550041134119e+09,1.79571655008724403385e+09,X'B083C23D59D70353',X'014514958BA01F53BC060002021328B52FFD200A5100004D025500521FB885BECB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(26,15,1,0,23,'chatcmpl-aef49fa757184ebf1a','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655005976104735e+09,1.79571655008733081816e+09,X'C74CF22B4A1BA675',X'01B9E97F6715D40A1B060002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(27,16,1,0,NULL,'chatcmpl-aef49fa757184ebf1b','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655006058263776e+09,1.79571655008740592007e+09,X'2BB1E6DBD90C85BF',X'01299EE451B34CF686000602021F28B52FFD2016B100000B4992261A734B02620A1C37013C7900CD1FCC85ECCB28B52FFD2012550000200000BFBF010032C002','[]','');
INSERT INTO "transitions" VALUES(28,17,1,0,27,'chatcmpl-aef49fa757184ebf1c','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655006649875639e+09,1795716550.08748,X'223EBA1181698982',X'01299EE451B34CF686060002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(29,18,1,0,27,'chatcmpl-aef49fa757184ebf1d','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.7957165500670390129e+09,1.79571655008755016328e+09,X'D636D1AFF97B503E',X'0103C252C642F9B177060002021328B52FFD200A5100004D025500521FB885BECB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(30,19,1,0,27,'chatcmpl-aef49fa757184ebf1e','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655006735324865e+09,1.79571655008762049677e+09,X'896267C480BA0885',X'01DB7DB5197260A1C3060002021328B52FFD200A510000D5026100E11F7A85B4CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(31,12,1,1,23,'chatcmpl-aef49fa757184ebf1f','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009634494788e+09,1.79571655011501669883e+09,X'E3BC4A6691F8D79C',X'01C9E3530E86D2A7A0060002021328B52FFD200A51000053023000661F668526CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(32,13,1,1,24,'chatcmpl-aef49fa757184ebf20','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009655022625e+09,1.79571655011757016183e+09,X'F3CFDCC75F3F2CAA',X'01891E344C8505011E060002021328B52FFD200A510000520251003D1F0A85B7CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(33,14,1,1,25,'chatcmpl-aef49fa757184ebf21','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009665179245e+09,1.79571655011776590347e+09,X'2DAFE9313BBF9781',X'0158C0C41A60C67C01060002021328B52FFD200A51000009027B00851FEB85F1CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(34,15,1,1,26,'chatcmpl-aef49fa757184ebf22','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.7957165500967447758e+09,1.79571655011785745624e+09,X'DBC8CCAAC5E83B56',X'01F8683B760B9E4C56060002021328B52FFD200A510000D5026100E11F7A85B4CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(35,16,1,1,27,'chatcmpl-aef49fa757184ebf23','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009683299065e+09,1.79571655011793613436e+09,X'2D3F78A2078932F9',X'0103C252C642F9B177060002021328B52FFD200A5100004D025500521FB885BECB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(36,17,1,1,28,'chatcmpl-aef49fa757184ebf24','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.7957165500969352722e+09,1.79571655011801195145e+09,X'3F84ABE1125AF9C9',X'01E9C3FB3F910DF50D060002021328B52FFD200A5100009A021C00141FAE85C7CB28B52FFD200631000000000000BEBF','[]','');
INSERT INTO "transitions" VALUES(37,18,1,1,29,'chatcmpl-aef49fa757184ebf25','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009702038762e+09,1.7957165501180887222e+09,X'C233095D40D0AD28',X'01C1CC84D3FD91D578060002021328B52FFD200A5100000F0216000A1FD78563CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(38,19,1,1,30,'chatcmpl-aef49fa757184ebf26','["agent"]','[[0,1]]','ok','stop',0,1.0,0,1.79571655009711027145e+09,1.79571655011816120155e+09,X'73C4E8144699FC4F',X'01299EE451B34CF686060002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(39,20,1,0,NULL,'chatcmpl-aef49fa757184ebf27','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.79571655027146387102e+09,1.79571655028558230401e+09,X'F62C0E801DCC3D75',X'017F1DEDF0E4D49A40000702022128B52FFD2018C100000B0CC343261A730F02625C273837013C16000A1FD78563CB28B52FFD2014550000200000BFBF010008C002','[]','');
INSERT INTO "transitions" VALUES(40,21,1,0,NULL,'chatcmpl-aef49fa757184ebf28','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.79571655027186274531e+09,1.79571655028604149819e+09,X'D26EAFCBFB261976',X'011E87D55B6698F4A5000702022128B52FFD2018C100000B0CC3B9261A734B02625C277637013C7900CD1FCC85ECCB28B52FFD2014550000200000BFBF010008C002','[]','');
INSERT INTO "transitions" VALUES(41,22,1,0,NULL,'chatcmpl-aef49fa757184ebf29','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.79571655027208042145e+09,1.79571655028615951533e+09,X'10E83A41CDA152C7',X'011FBFDE30875312C1000702022128B52FFD2018C100000B0CC357261A734B02625C275F37013C7900CD1FCC85ECCB28B52FFD2014550000200000BFBF010008C002','[]','');
INSERT INTO "transitions" VALUES(42,20,1,1,39,'chatcmpl-aef49fa757184ebf2a','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.79571655029446792606e+09,1.79571655029914617539e+09,X'6D3B05E31D71DA3F',X'01865932A821CFCD84070002021328B52FFD200A51000053023000661F668526CB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(43,21,1,1,40,'chatcmpl-aef49fa757184ebf2b','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.7957165502946739197e+09,1.79571655029935431475e+09,X'384E7A6891BBECCE',X'011E87D55B6698F4A5070002021328B52FFD200A5100004B027900CD1FCC85ECCB28B52FFD200631000000000000BFBF','[]','');
INSERT INTO "transitions" VALUES(44,22,1,1,41,'chatcmpl-aef49fa757184ebf2c','["agent"]','[[0,2]]','ok','stop',0,1.0,0,1.7957165502947776318e+09,1.79571655029943847651e+09,X'66CE7844E91F4485',X'01BA5D109BF16F6673070002021328B52FFD200A5100009A021C00141FAE85C7CB28B52FFD200631000000000000BEBF','[]','');
CREATE INDEX rollouts_by_run ON rollouts (run, n);
CREATE INDEX rollouts_by_status ON rollouts (run, status, n);
CREATE INDEX rollouts_by_step ON rollouts (run, step, n);
CREATE INDEX rollouts_by_group ON rollouts (run, group_id);
CREATE INDEX rollouts_by_lease ON rollouts (run, lease_until) WHERE status = 'running';
CREATE INDEX rollouts_by_worker ON rollouts (worker) WHERE status = 'running';
CREATE INDEX transitions_roots ON transitions (rollout) WHERE parent IS NULL;
CREATE INDEX aliases_by_name ON aliases (name, alias, n);
CREATE INDEX runs_by_project ON runs (project, created_at);
CREATE INDEX answers_by_time ON answers (until);
CREATE INDEX answers_by_run ON answers (run) WHERE run <> '';
COMMIT;
