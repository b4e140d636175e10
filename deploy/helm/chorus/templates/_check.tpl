{{- /* Combinations that the schema can't refuse. */ -}}
{{- define "chorus.check" -}}
{{- if and .Values.adapters.uploads.enabled (or (gt (int .Values.replicas) 1) (ne .Values.autoscaling.kind "none")) -}}
{{- fail "adapters.uploads.enabled needs replicas: 1 and autoscaling.kind: none; uploads belong to one server" -}}
{{- end -}}
{{- if and (not .Values.keys.apiKeys) (not .Values.keys.allowUnauthenticated) -}}
{{- fail "keys.apiKeys is empty; name the entry of keys.secret with the clients' keys, or set keys.allowUnauthenticated" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.keys.apiKeys (not .Values.serviceMonitor.keySecret.name) -}}
{{- fail "serviceMonitor.enabled is set, but /metrics needs a key; name an entry of a Secret with a key in serviceMonitor.keySecret" -}}
{{- end -}}
{{- include "chorus.check.flags" . -}}
{{- include "chorus.check.network" . -}}
{{- include "chorus.check.autoscaling" . -}}
{{- include "chorus.check.adapterSync" . -}}
{{- end -}}

{{- define "chorus.check.adapterSync" -}}
{{- if .Values.adapterSync.enabled -}}
{{- if not .Values.adapterSync.image -}}
{{- fail "adapterSync.enabled needs adapterSync.image" -}}
{{- end -}}
{{- if or .Values.keys.apiKeys .Values.keys.adminKeys -}}
{{- fail "adapterSync.enabled is set, but its sidecar sends no key; empty keys.apiKeys and keys.adminKeys, and set keys.allowUnauthenticated" -}}
{{- end -}}
{{- $roots := .Values.adapters.roots | default (without (list .Values.adapters.path) "") -}}
{{- if not $roots -}}
{{- fail "adapterSync.enabled needs adapters.roots, the directories that adapters may be loaded from" -}}
{{- end -}}
{{- range .Values.adapterSync.adapters -}}
{{- $source := clean .source -}}
{{- $isBelow := not (or (isAbs $source) (hasPrefix "../" (printf "%s/" $source))) -}}
{{- range $roots -}}
{{- $isBelow = or $isBelow (eq $source (clean .)) (hasPrefix (printf "%s/" (clean .)) $source) -}}
{{- end -}}
{{- if not $isBelow -}}
{{- fail (printf "adapterSync.adapters has the source %s, which lies outside %s; name its directory in adapters.roots" .source (join ", " $roots)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Settings and flags that the deployment writes itself, with the values that they come from. */ -}}
{{- define "chorus.check.flags" -}}
{{- $own := dict
  "host" "service"
  "port" "service.port"
  "model" "model.path"
  "adapters" "adapters.path"
  "adapter-roots" "adapters.roots"
  "adapter-source" "adapters.sources"
  "adapter-source-hosts" "adapters.sourceHosts"
  "adapter-uploads" "adapters.uploads"
  "api-key" "keys.secret and keys.apiKeys"
  "api-key-file" "keys.secret and keys.apiKeys"
  "admin-key" "keys.secret and keys.adminKeys"
  "admin-key-file" "keys.secret and keys.adminKeys"
  "allow-unauthenticated" "keys.allowUnauthenticated"
-}}
{{- if gt (int .Values.gpus) 1 -}}
{{- $own = merge $own (dict "tensor-parallel-size" "gpus" "tp" "gpus") -}}
{{- end -}}
{{- range $name, $_ := .Values.settings -}}
{{- with get $own (trimPrefix "CHORUS_" $name | lower | replace "_" "-") -}}
{{- fail (printf "settings has %s, which the chart gives itself; use %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- range .Values.args -}}
{{- $flag := regexFind "^--?[A-Za-z_-]+" . -}}
{{- with get $own (trimAll "-" $flag | replace "_" "-" | trimPrefix "no-") -}}
{{- fail (printf "args has %s, which the chart gives itself; use %s" $flag .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What is usually reached from other namespaces, or from outside, where only this namespace's pods are admitted. */ -}}
{{- define "chorus.check.network" -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.from) -}}
{{- $only := "but the network policy admits only pods of the server's namespace" -}}
{{- if ne .Values.service.type "ClusterIP" -}}
{{- fail (printf "service.type is %s, %s; name the peers in networkPolicy.from, such as [{ipBlock: {cidr: 10.0.0.0/8}}]" .Values.service.type $only) -}}
{{- end -}}
{{- range $value, $peer := dict "serviceMonitor" "Prometheus" "inferencePool" "a gateway" -}}
{{- if (get $.Values $value).enabled -}}
{{- fail (printf "%s.enabled is set, %s, and %s may be in another; name its peers in networkPolicy.from ([{podSelector: {}}] are these pods)" $value $only $peer) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "chorus.check.autoscaling" -}}
{{- $scaling := .Values.autoscaling -}}
{{- if ne $scaling.kind "none" -}}
{{- if and (eq $scaling.kind "keda") (not $scaling.prometheus) -}}
{{- fail "autoscaling.kind is keda, which asks Prometheus; set autoscaling.prometheus to its address" -}}
{{- end -}}
{{- if and (eq $scaling.kind "hpa") (or $scaling.prometheus $scaling.query) -}}
{{- fail "autoscaling.query and autoscaling.prometheus are for autoscaling.kind keda; empty them, or use it" -}}
{{- end -}}
{{- if gt (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %d, more than autoscaling.maxReplicas, which is %d" (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq (int64 $scaling.minReplicas) 0) (not (and (eq $scaling.kind "keda") $scaling.query)) -}}
{{- fail "autoscaling.minReplicas is 0, but servers that are not there tell no load; give 1, or with keda an autoscaling.query" -}}
{{- end -}}
{{- end -}}
{{- end -}}
