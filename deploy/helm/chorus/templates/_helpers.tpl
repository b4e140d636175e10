{{- define "chorus.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "chorus.selector" -}}
app.kubernetes.io/name: chorus
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "chorus.labels" -}}
{{ include "chorus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "chorus.image" -}}
{{- $version := printf "%s%s" .Chart.AppVersion (gt (int .Values.gpus) 0 | ternary "-cuda" "") -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $version }}
{{- end -}}

{{- /* The settings as a ConfigMap's data. Numbers of a values file are floats, which Helm writes as 1.048576e+06. */ -}}
{{- define "chorus.settings" -}}
{{- range $name, $value := .Values.settings }}
{{ $name }}: {{ include "chorus.plain" $value | quote }}
{{- end }}
{{- end -}}

{{- define "chorus.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{ printf "%.0f" . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}
